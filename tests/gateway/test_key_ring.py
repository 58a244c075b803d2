import hmac

import pytest

from gateway.api_keys import ApiKey, hash_of_key
from gateway.errors import Overloaded, Unauthorized
from gateway.key_ring import MAX_TICKETS, TICKET_LIFETIME_S, KeyRing


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def key(name, secret=None, **fields) -> ApiKey:
    return ApiKey(name=name, sha256=hash_of_key(secret or f"key of {name}"), **fields)


def bearer(name):
    return f"Bearer key of {name}"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ring(clock):
    return KeyRing([key("alice", tenant="team"), key("root", admin=True)], clock=clock)


def test_a_known_key_is_its_caller(ring):
    alice = ring.caller(bearer("alice"))
    assert (alice.key_name, alice.tenant, alice.is_admin) == ("alice", "team", False)
    root = ring.caller("bearer  key of root ")
    assert (root.key_name, root.tenant, root.is_admin) == ("root", "root", True)
    assert alice.account is not root.account
    assert alice.principal != root.principal


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", "Bearer x", "Basic key of alice", "key of alice"),
        *("Bearer key of alice2", "Bearer key of alic", "Bearer \udcff", "Bearer é"),
        f"Bearer {hash_of_key('key of alice')}",
    ],
)
def test_any_other_is_refused_and_the_answer_tells_how_to_send_one(ring, header):
    with pytest.raises(Unauthorized) as caught:
        ring.caller(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers() == {"WWW-Authenticate": "Bearer"}


def test_every_key_is_compared_in_constant_time_whichever_fits(ring, monkeypatch):
    compared = []

    def compare(a, b):
        compared.append(a)
        return hmac_compare(a, b)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr("gateway.key_ring.hmac.compare_digest", compare)
    ring.caller(bearer("alice"))
    with pytest.raises(Unauthorized):
        ring.caller("Bearer nobody")
    assert compared == 2 * [bytes.fromhex(hash_of_key(f"key of {n}")) for n in ("alice", "root")]


def test_without_keys_everybody_is_one_account():
    ring = KeyRing(None)
    assert ring.is_open
    assert ring.caller(None).account is ring.caller("Bearer x").account
    assert [account.name for account in ring.accounts] == ["anonymous"]


def test_an_empty_set_of_keys_lets_nobody_in():
    ring = KeyRing([])
    assert not ring.is_open
    with pytest.raises(Unauthorized):
        ring.caller(bearer("alice"))


def test_accounts_go_on_when_keys_are_replaced(ring):
    alice, root = (ring.caller(bearer(name)).account for name in ("alice", "root"))
    alice.begin(1, prompt_tokens=1)
    ring.replace([key("alice", tenant="team", requests_per_minute=7), key("new")])
    assert ring.caller(bearer("alice")).account is alice
    assert alice.quota.requests_per_minute == 7
    assert ring.caller(bearer("new")).account.usage.num_requests == 0
    with pytest.raises(Unauthorized):
        ring.caller(bearer("root"))
    with pytest.raises(Unauthorized):
        root.check(1)  # on a websocket that is still open


def test_a_new_key_under_an_old_name_goes_on_counting_but_the_old_one_is_out(ring):
    old = ring.caller(bearer("alice")).account
    old.begin(1, prompt_tokens=1)
    ring.replace([key("alice", secret="another")])
    new = ring.caller("Bearer another").account
    assert new.usage.num_requests == 1
    new.check(1)
    with pytest.raises(Unauthorized):
        old.check(1)
    with pytest.raises(Unauthorized):
        ring.caller(bearer("alice"))


def test_a_ticket_stands_for_its_caller_once(ring):
    alice = ring.caller(bearer("alice"))
    ticket = ring.issue_ticket(alice)
    assert ring.redeem(ticket) is alice
    with pytest.raises(Unauthorized):
        ring.redeem(ticket)


def test_a_ticket_grows_old(ring, clock):
    early, late = (ring.issue_ticket(ring.caller(bearer("alice"))) for _ in range(2))
    clock.now_s += TICKET_LIFETIME_S - 0.1
    ring.redeem(early)
    clock.now_s += 0.1
    with pytest.raises(Unauthorized):
        ring.redeem(late)


def test_the_ticket_of_a_revoked_key_is_void(ring):
    ticket = ring.issue_ticket(ring.caller(bearer("alice")))
    ring.replace([key("root", admin=True)])
    with pytest.raises(Unauthorized):
        ring.redeem(ticket)


def test_tickets_are_bounded_for_each_key(ring, clock):
    alice, root = ring.caller(bearer("alice")), ring.caller(bearer("root"))
    for _ in range(MAX_TICKETS):
        ring.issue_ticket(alice)
    with pytest.raises(Overloaded) as caught:
        ring.issue_ticket(alice)
    assert caught.value.code == "too_many_tickets"
    ring.issue_ticket(root)
    clock.now_s += TICKET_LIFETIME_S
    ring.issue_ticket(alice)


@pytest.mark.parametrize("ticket", ["", "x", "\udcff", "x" * 100_000])
def test_what_was_never_issued_is_no_ticket(ring, ticket):
    with pytest.raises(Unauthorized):
        ring.redeem(ticket)


@pytest.mark.parametrize("change", [{"tenant": "other"}, {"tenant": "team", "admin": True}])
def test_a_key_that_says_something_else_of_its_holder_goes_on_counting_as_another(ring, change):
    caller = ring.caller(bearer("alice"))
    caller.account.begin(1, prompt_tokens=1)
    ticket = ring.issue_ticket(caller)
    ring.replace([key("alice", **change)])
    new = ring.caller(bearer("alice")).account
    assert new is not caller.account
    assert new.usage.num_requests == 1
    with pytest.raises(Unauthorized):
        caller.account.check(1)
    with pytest.raises(Unauthorized):
        ring.redeem(ticket)


def test_without_keys_tickets_are_used_up_too():
    ring = KeyRing(None)
    caller = ring.caller("Bearer x")
    for _ in range(MAX_TICKETS + 1):
        assert ring.redeem(ring.issue_ticket(caller)) is caller
