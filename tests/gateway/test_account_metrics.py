from prometheus_client.parser import text_string_to_metric_families

from gateway.account_metrics import AccountCollector
from gateway.accounts import Account, UsageSoFar
from gateway.metrics import Metrics


def test_each_account_has_its_series_as_it_is_when_asked():
    accounts = [Account("alice"), Account("bob")]
    metrics = Metrics("m")
    metrics.watch(AccountCollector(lambda: accounts, "m"))
    accounts[0].begin(2, prompt_tokens=1)
    accounts[0].usage = UsageSoFar(
        num_requests=2,
        num_refused=3,
        prompt_tokens=4,
        cached_tokens=5,
        completion_tokens=6,
        busy_s=7.5,
    )
    numbers = {
        (sample.name, sample.labels["key"]): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
        if sample.name.startswith("headrace_key_")
    }
    names = {
        "key_requests_running": 2,
        "key_requests_total": 2,
        "key_requests_refused_total": 3,
        "key_prompt_tokens_total": 4,
        "key_cached_tokens_total": 5,
        "key_generation_tokens_total": 6,
        "key_busy_seconds_total": 7.5,
    }
    assert numbers == {
        **{(f"headrace_{name}", "alice"): value for name, value in names.items()},
        **{(f"headrace_{name}", "bob"): 0 for name in names},
    }
