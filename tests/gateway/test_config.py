import pytest

from gateway.config import GatewayConfig


def test_the_defaults_stay_on_this_machine():
    config = GatewayConfig()
    assert (config.host, config.allowed_hosts, config.allowed_origins) == ("127.0.0.1", (), ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"served_model_names": ()}, "served_model_names"),
        ({"served_model_names": ("a", "")}, "served_model_names"),
        ({"metrics_prefix": "other"}, "metrics_prefix"),
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"max_n": 0}, "max_n"),
        ({"max_body_bytes": -1}, "max_body_bytes"),
        ({"send_timeout_s": float("nan")}, "send_timeout_s"),
        ({"sse_keep_alive_interval_s": 0}, "sse_keep_alive_interval_s"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s"),
        ({"allowed_origins": ("chat.example",)}, "chat.example"),
        ({"allowed_origins": ("https://chat.example/",)}, "chat.example"),
    ],
)
def test_nonsense_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        GatewayConfig(**fields)


def test_keep_alives_can_be_off():
    assert GatewayConfig(sse_keep_alive_interval_s=None).sse_keep_alive_interval_s is None


def test_the_first_name_is_the_one_we_report():
    assert GatewayConfig(served_model_names=("a", "b")).model_name == "a"


@pytest.mark.parametrize(
    ("host", "everywhere"),
    [("0.0.0.0", True), ("::", True), ("", True), ("127.0.0.1", False), ("my.example", False)],
)
def test_a_wildcard_address_listens_everywhere(host, everywhere):
    assert GatewayConfig(host=host).listens_everywhere is everywhere
