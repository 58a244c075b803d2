import click
import pytest
from click.testing import CliRunner

from gateway.commands.serve_options import serve_options
from gateway.config import GatewayConfig


def parsed(*arguments, **environment):
    given = {}

    @click.command(context_settings={"auto_envvar_prefix": "HEADRACE"})
    @serve_options
    def command(**options):
        given.update(options)

    result = CliRunner(env=environment).invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return given


def test_the_defaults_are_those_of_the_configuration():
    given, config = parsed(), GatewayConfig()
    assert given["max_body_bytes"] == config.max_body_bytes
    assert given["max_connections"] == config.max_connections
    assert given["max_websockets"] == config.ws_max_connections
    assert given["websocket_idle_timeout"] == config.ws_idle_timeout_s
    assert given["websocket_max_age"] == config.ws_max_age_s
    assert given["header_timeout"] == config.header_timeout_s
    assert given["body_timeout"] == config.body_read_timeout_s
    assert given["send_timeout"] == config.send_timeout_s
    assert given["keepalive_timeout"] == config.keepalive_timeout_s
    assert given["api_key"] == ()
    assert given["api_keys_file"] is None
    assert given["allow_unauthenticated"] is False
    assert (given["log_level"], given["log_format"]) == ("info", "text")


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--max-body-bytes", "16M"], "max_body_bytes", 16 << 20),
        (["--header-timeout", "2.5"], "header_timeout", 2.5),
        (["--log-format", "json"], "log_format", "json"),
        (["--allow-unauthenticated"], "allow_unauthenticated", True),
        (["--api-key", "a", "--api-key", "b"], "api_key", ("a", "b")),
    ],
)
def test_values_are_read(arguments, name, value):
    assert parsed(*arguments)[name] == value


def test_a_key_can_be_kept_off_the_command_line():
    assert parsed(HEADRACE_API_KEY="0123456789abcdef")["api_key"] == ("0123456789abcdef",)
