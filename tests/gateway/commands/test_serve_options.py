from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from gateway.commands.serve_options import ServeOptions, as_options, serve_options
from gateway.config import GatewayConfig
from jaxengine.config import EngineConfig
from jaxengine.engine_options import EngineOptions


def parsed(*arguments, **environment):
    """Return what a command with these options is given."""
    given = {}

    @click.command(context_settings={"auto_envvar_prefix": "HEADRACE"})
    @serve_options
    def command(**options):
        given.update(options)

    result = CliRunner(env=environment).invoke(command, arguments, catch_exceptions=False)
    if result.exit_code:
        raise click.UsageError(result.output.splitlines()[-1])
    return given


def test_a_command_is_given_exactly_the_declared_options():
    assert parsed().keys() == ServeOptions.__annotations__.keys()


def test_the_defaults_are_those_of_the_configurations():
    given, engine, gateway = parsed(), EngineConfig(), GatewayConfig()
    for name in (
        *(
            "dtype",
            "quantization",
            "kv_cache_dtype",
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
        ),
        *("max_num_seqs", "long_prefill_token_threshold", "batching", "scheduling_policy"),
        *("priority_aging_s", "enable_prefix_caching", "overlap", "decode_steps"),
        *("num_speculative_tokens",),
        *("num_step_records", "watermark"),
    ):
        assert given[name] == getattr(engine, name), name
    assert given["batch_window_ms"] == engine.batch_window_s * 1000
    assert given["target_itl_ms"] is engine.target_itl_s is None
    # A server bounds its queue by itself; an engine alone is told to.
    options = EngineOptions()
    assert given["queue_timeout"] == options.queue_timeout_s == 300
    assert given["max_num_queued_tokens"] == options.max_num_queued_tokens == 2**20
    assert given["keep_codes"] is options.keep_codes is True
    assert given["max_num_queued_reqs"] == engine.max_num_queued_requests
    assert given["block_size"] is options.block_size is None
    assert (given["host"], given["port"]) == (gateway.host, gateway.port)
    assert given["shutdown_timeout"] == gateway.shutdown_timeout_s


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype", "fp8_e4m3"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype", "int8"),
        (["--block-size", "64"], "block_size", 64),
        (["--no-keep-codes"], "keep_codes", False),
        (["--quantization", "int8"], "quantization", "int8"),
        (["--quantization", "fp8"], "quantization", "fp8"),
        (["--batching", "static"], "batching", "static"),
        (["--scheduling-policy", "fcfs"], "scheduling_policy", "fcfs"),
        (["--target-itl-ms", "20"], "target_itl_ms", 20.0),
        (["--watermark", "1%"], "watermark", 0.01),
        (["--watermark", "16"], "watermark", 16.0),
        (["--kv-cache-memory-share", "30%"], "kv_cache_memory_share", 0.3),
        (
            ["--tenant-weight", "alice=2", "--tenant-weight", "bob=0.5"],
            "tenant_weight",
            (("alice", 2.0), ("bob", 0.5)),
        ),
    ],
)
def test_a_value_is_taken_over(arguments, name, value):
    assert parsed(*arguments)[name] == value


def test_variables_set_the_same_options():
    given = parsed(HEADRACE_TENANT_WEIGHT="alice=2 bob=0.5", HEADRACE_MAX_NUM_QUEUED_REQS="7")
    assert given["tenant_weight"] == (("alice", 2.0), ("bob", 0.5))
    assert given["max_num_queued_reqs"] == 7


def test_a_tenant_has_one_weight():
    with pytest.raises(click.UsageError, match="the tenant 'alice' is given twice"):
        parsed("--tenant-weight", "alice=2", "--tenant-weight", "alice=3")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("max_num_seqs (9) is too many", "--max-num-seqs (9) is too many"),
        ("served_model_names must not be empty", "--served-model-name must not be empty"),
        ("max_num_queued_requests must", "--max-num-queued-reqs must"),
        ("queue_timeout_s must be positive", "--queue-timeout must be positive"),
        ("target_itl_s must be positive", "--target-itl-ms must be positive"),
        ("batch_window_s and priority_aging_s", "--batch-window-ms and --priority-aging-s"),
        ("block 0 is no_such_option", "block 0 is no_such_option"),
    ],
)
def test_fields_are_spelled_as_options(message, said):
    assert as_options(message) == said


def test_every_field_of_the_engine_that_an_operator_sets_has_an_option():
    # The plan decides these.
    decided = {"num_blocks", "token_buckets"}
    for field in fields(EngineConfig):
        if field.name not in decided and "_" in field.name:
            assert as_options(field.name).startswith("--"), field.name
