import pytest

from gateway.accounts import Account
from gateway.callers import Caller, anonymous_caller
from gateway.errors import Forbidden, InvalidRequest

ACCOUNT = Account("a")


def test_a_request_with_a_key_has_the_tenant_of_the_key():
    caller = Caller(account=ACCOUNT, tenant="team", key_name="a")
    assert caller.tenant_of(None) == caller.tenant_of("team") == "team"


def test_a_request_with_a_key_cannot_make_itself_somebody_elses():
    caller = Caller(account=ACCOUNT, tenant="team", key_name="a")
    with pytest.raises(Forbidden) as caught:
        caller.tenant_of("others")
    error = caught.value
    assert (error.status, error.param, error.code) == (403, "tenant", "tenant_not_allowed")


def test_without_keys_a_request_is_taken_at_its_word():
    caller = anonymous_caller(ACCOUNT, "Bearer abc")
    assert caller.tenant_of(None) == "ba7816bf8f01cfea"  # sha256 of abc
    assert caller.tenant_of("alice") == "alice"
    assert caller.is_admin


@pytest.mark.parametrize("key_name", [None, "a"])
def test_what_is_no_name_is_refused_as_such(key_name):
    with pytest.raises(InvalidRequest):
        Caller(account=ACCOUNT, tenant="team", key_name=key_name).tenant_of("\n")


def test_without_keys_who_sends_another_one_is_another_principal():
    first, second = (anonymous_caller(ACCOUNT, f"Bearer {key}") for key in ("abc", "abd"))
    assert first.principal != second.principal
    assert anonymous_caller(ACCOUNT, "bearer abc ").principal == first.principal
