import pytest

from gateway.accounts import Account, Quota
from gateway.api_keys import ApiKey, hash_of_key
from gateway.errors import GatewayError, InvalidRequest, Unauthorized
from gateway.key_ring import KeyRing
from gateway.timing import Timing


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def timing(prefill_s=0.5, decode_s=1.5) -> Timing:
    return Timing(
        queue_s=7.0,
        prefill_s=prefill_s,
        decode_s=decode_s,
        ttft_s=None,
        e2e_s=9.0,
        itl_mean_s=None,
        itl_p50_s=None,
        itl_p99_s=None,
        itl_max_s=None,
        num_preemptions=0,
    )


def refusal(account, num_requests=1, prompt_tokens=1):
    with pytest.raises(GatewayError) as caught:
        account.check(num_requests, prompt_tokens=prompt_tokens)
    return caught.value


def test_without_a_quota_everything_passes(clock):
    account = Account("a", clock=clock)
    for _ in range(1000):
        account.begin(100, prompt_tokens=10**9)
    account.check(10**6)


def test_requests_beyond_the_minutes_worth_wait_for_the_refill(clock):
    account = Account("a", Quota(requests_per_minute=60), clock=clock)
    account.begin(60, prompt_tokens=1)
    error = refusal(account)
    assert (error.status, error.code, error.type) == (
        429,
        "requests_per_minute",
        "rate_limit_error",
    )
    assert error.retry_after_s == 1.0  # one a second
    assert error.headers() == {"Retry-After": "1"}
    clock.now_s += 1
    account.begin(1, prompt_tokens=1)
    assert refusal(account, 3).retry_after_s == 3.0
    clock.now_s += 3600
    account.begin(60, prompt_tokens=1)  # an hour saved up no more than a minute
    assert refusal(account).retry_after_s == 1.0


def test_more_requests_at_once_than_a_minute_holds_can_never_begin(clock):
    account = Account("a", Quota(requests_per_minute=3), clock=clock)
    account.begin(1, prompt_tokens=1)
    with pytest.raises(
        InvalidRequest, match="4 requests at once, and this key may have 3 a minute"
    ):
        account.check(4)


def test_prompts_and_answers_draw_on_the_tokens(clock):
    account = Account("a", Quota(tokens_per_minute=600), clock=clock)
    account.begin(1, prompt_tokens=500)
    error = refusal(account, prompt_tokens=200)
    assert (error.status, error.code, error.retry_after_s) == (429, "tokens_per_minute", 10.0)
    account.add_output(100)
    assert refusal(account, prompt_tokens=1).retry_after_s == pytest.approx(0.1)


def test_an_answer_may_overdraw_and_the_next_request_waits_until_it_is_paid_back(clock):
    account = Account("a", Quota(tokens_per_minute=60), clock=clock)
    account.begin(1, prompt_tokens=10)
    account.add_output(110)  # 60 below
    assert refusal(account).retry_after_s == pytest.approx(61)
    clock.now_s += 61
    account.check(1)


def test_a_prompt_larger_than_the_minutes_worth_waits_for_a_full_one(clock):
    account = Account("a", Quota(tokens_per_minute=60), clock=clock)
    account.begin(1, prompt_tokens=1000)
    assert refusal(account).retry_after_s == pytest.approx(941)
    clock.now_s += 1000
    account.check(1, prompt_tokens=1000)


def test_so_many_may_run_at_a_time_and_an_end_makes_room(clock):
    account = Account("a", Quota(max_concurrent_requests=2), clock=clock)
    account.begin(2, prompt_tokens=1)
    error = refusal(account)
    assert (error.status, error.code, error.retry_after_s) == (429, "concurrent_requests", 1.0)
    account.end(prompt_tokens=1, cached_tokens=0, timing=timing())
    account.check(1)
    with pytest.raises(InvalidRequest, match="3 requests at once, and this key may have 2 at a"):
        account.check(3)


def test_what_the_engine_did_not_take_costs_nothing(clock):
    quota = Quota(requests_per_minute=2, tokens_per_minute=100, max_concurrent_requests=2)
    account = Account("a", quota, clock=clock)
    account.begin(2, prompt_tokens=100)
    account.take_back(2, prompt_tokens=100)
    account.check(2, prompt_tokens=100)
    assert (account.num_running, account.usage.num_requests) == (0, 0)


def test_a_closed_account_begins_nothing(clock):
    account = Account("a", clock=clock)
    account.close()
    with pytest.raises(Unauthorized):
        account.begin(1, prompt_tokens=1)


def test_a_bound_that_stays_keeps_what_was_used_of_it(clock):
    account = Account("a", Quota(requests_per_minute=1, tokens_per_minute=10), clock=clock)
    account.begin(1, prompt_tokens=10)
    account.quota = Quota(requests_per_minute=1, tokens_per_minute=20)
    assert refusal(account).code == "requests_per_minute"
    account.quota = Quota(tokens_per_minute=20)
    account.check(1, prompt_tokens=20)


def test_usage_adds_up(clock):
    account = Account("a", clock=clock)
    account.begin(2, prompt_tokens=30)
    account.add_output(5)
    account.end(prompt_tokens=10, cached_tokens=4, timing=timing())
    account.add_output(6)
    account.end(prompt_tokens=20, cached_tokens=0, timing=timing(prefill_s=1.0))
    account.count_refusal()
    usage = account.usage
    assert (usage.num_requests, usage.num_refused) == (2, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (30, 4, 11)
    assert usage.busy_s == 0.5 + 1.5 + 1.0 + 1.5
    assert account.num_running == 0


@pytest.mark.parametrize("bound", ["requests_per_minute", "max_concurrent_requests"])
def test_what_never_fits_is_refused_even_where_nothing_was_used(clock, bound):
    account = Account("a", Quota(**{bound: 3}), clock=clock)
    with pytest.raises(InvalidRequest, match="4 requests at once, and this key may have 3"):
        account.begin(4, prompt_tokens=1)
    account.begin(3, prompt_tokens=1)


def test_what_only_ever_waited_costs_no_quota(clock):
    quota = Quota(requests_per_minute=2, tokens_per_minute=100, max_concurrent_requests=2)
    account = Account("a", quota, clock=clock)
    account.begin(2, prompt_tokens=100)
    account.end_unbegun(prompt_tokens=60)
    account.check(1, prompt_tokens=60)
    assert account.num_running == 1
    assert account.usage.num_requests == 2  # a counter, which never falls


def test_headers_tell_what_is_left_of_each_rate(clock):
    account = Account("a", Quota(requests_per_minute=60, tokens_per_minute=1200), clock=clock)
    account.begin(2, prompt_tokens=1000)
    account.add_output(500)  # 300 more than there are
    assert account.rate_headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "2s",  # one a second
        "x-ratelimit-limit-tokens": "1200",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m15s",  # 1500 at 20 a second
    }
    clock.now_s += 1.5
    assert account.rate_headers()["x-ratelimit-reset-requests"] == "500ms"
    assert Account("b", Quota(max_concurrent_requests=1)).rate_headers() == {}


async def test_answers_tell_what_is_left_of_the_rates_of_a_key(start_gateway):
    keys = [
        ApiKey(name="alice", sha256=hash_of_key("a"), requests_per_minute=2),
        ApiKey(name="bob", sha256=hash_of_key("b")),
    ]
    gateway = await start_gateway(keys=KeyRing(keys), allowed_origins=("http://page",))
    headers = {"Authorization": "Bearer a", "Origin": "http://page"}

    async def asked(body, headers):
        async with gateway.session.post("/v1/completions", json=body, headers=headers) as answer:
            return answer.status, answer.headers

    for stream, left in ((True, "1"), (False, "0")):
        body = {"prompt": "x", "max_tokens": 1, "stream": stream}
        _, told = await asked(body, headers)
        assert told["x-ratelimit-remaining-requests"] == left
        assert "x-ratelimit-remaining-requests" in told["Access-Control-Expose-Headers"]
    status, told = await asked(body, headers)
    assert (status, told["x-ratelimit-limit-requests"]) == (429, "2")
    _, told = await asked(body, {"Authorization": "Bearer b"})
    assert not any(name.startswith("x-ratelimit") for name in told)
