import pytest

from gateway.errors import InvalidRequest
from gateway.tenants import check_tenant_name, is_tenant_name, tenant_of_key

# printf %s abc | sha256sum | cut -c 1-16
ABC_DIGEST = "ba7816bf8f01cfea"


@pytest.mark.parametrize("header", ["Bearer abc", "bearer abc", "BEARER   abc ", " Bearer abc"])
def test_a_bearer_key_is_a_tenant_by_its_digest(header):
    assert tenant_of_key(header) == ABC_DIGEST


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "abc"])
def test_without_a_bearer_key_there_is_no_tenant(header):
    assert tenant_of_key(header) == ""


def test_a_key_in_strange_bytes_is_a_key():
    assert len(tenant_of_key("Bearer \udcff")) == 16


@pytest.mark.parametrize("name", ["a", "x" * 64, "two words", "Zoë", "7"])
def test_printable_names_pass(name):
    assert is_tenant_name(name)
    check_tenant_name(name)


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "a\x00", "\u2028"])
def test_other_names_are_refused(name):
    with pytest.raises(InvalidRequest, match="tenant must have 1 to 64 printable") as caught:
        check_tenant_name(name)
    assert caught.value.param == "tenant"
