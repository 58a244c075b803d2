"""The options of `headrace serve`: their names, types, defaults and help."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import click

from gateway.commands.door_options import DOOR, DoorOptions
from gateway.commands.option_types import (
    ByteSize,
    PositiveNumber,
    Seconds,
    Share,
    TenantWeight,
    Watermark,
)
from gateway.config import METRICS_PREFIX, ReasoningFormat, ToolParserName
from jaxengine.config import BatchingMode, Dtype, KVCacheDtype, Quantization, SchedulingPolicy
from kernels_pallas.kernel_names import WantedKernel

__all__ = ["ServeOptions", "as_options", "serve_options"]

# vLLM's name for the format that nearly everybody means.
KV_CACHE_DTYPE_ALIASES: dict[str, KVCacheDtype] = {"fp8": "fp8_e4m3"}

# Fields whose options are not spelled like them: vLLM's name, or a unit that fits the usual values.
OPTION_OF_FIELD = {
    "max_num_queued_requests": "max_num_queued_reqs",
    "target_itl_s": "target_itl_ms",
    "batch_window_s": "batch_window_ms",
}


class ServeOptions(DoorOptions):
    """What the command line gives. Names as on the command line, units as there."""

    host: str
    port: int
    port_file: Path | None
    served_model_name: tuple[str, ...]
    dtype: Dtype
    quantization: Quantization | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_scheduled_tokens: int | None
    long_prefill_token_threshold: int
    target_itl_ms: float | None
    batching: BatchingMode
    batch_window_ms: float
    scheduling_policy: SchedulingPolicy
    priority_aging_s: float
    tenant_weight: tuple[tuple[str, float], ...]
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    queue_timeout: float
    kv_cache_dtype: KVCacheDtype
    attention_kernel: WantedKernel
    keep_codes: bool
    tensor_parallel_size: int
    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None
    block_size: int | None
    kv_cache_memory_bytes: int | None
    kv_cache_memory_share: float | None
    num_kv_blocks: int | None
    watermark: float
    enable_prefix_caching: bool
    overlap: bool
    decode_steps: int
    num_speculative_tokens: int
    num_step_records: int
    step_timeout: float
    chat_template: Path | None
    tool_call_parser: ToolParserName
    reasoning_parser: ReasoningFormat
    metrics_prefix: str
    shutdown_timeout: float
    sse_keep_alive_interval: float


def _kv_cache_dtype(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """Callback of --kv-cache-dtype."""
    return KV_CACHE_DTYPE_ALIASES.get(value, value)


def _tenant_weights(
    _ctx: click.Context, _param: click.Parameter, value: tuple[tuple[str, float], ...]
) -> tuple[tuple[str, float], ...]:
    """Callback of --tenant-weight."""
    names = [name for name, _ in value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise click.BadParameter(f"the tenant {twice[0]!r} is given twice")
    return value


WHERE = (
    click.option("--host", default="127.0.0.1", help="Address to listen on."),
    click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 takes a free one."),
    click.option(
        "--port-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the port here once we listen.",
    ),
    click.option("--served-model-name", multiple=True, help="Name in requests; may be repeated."),
)

STEPS = (
    click.option(
        "--dtype",
        default="bfloat16",
        type=click.Choice(get_args(Dtype)),
        help="Of weights and activations.",
    ),
    click.option(
        "--quantization",
        type=click.Choice(get_args(Quantization)),
        help="Of the weights of products instead: faster, and half the memory, for a little "
        "quality. fp8 needs an NVIDIA GPU from Ada on. [default: none]",
    ),
    click.option("--max-model-len", type=click.IntRange(2), help="Context; default: the model's."),
    click.option(
        "--max-num-seqs", default=64, type=click.IntRange(1, 4096), help="Running requests."
    ),
    click.option(
        "--max-num-batched-tokens",
        default=512,
        type=click.IntRange(8, 65536),
        help="Tokens that a step can hold.",
    ),
    click.option(
        "--max-num-scheduled-tokens",
        type=click.IntRange(1),
        help="Tokens that the scheduler puts into a step; default: what it can hold.",
    ),
    click.option(
        "--long-prefill-token-threshold",
        default=0,
        type=click.IntRange(0),
        help="Prompt tokens of one request in a step while there are others; 0 sets no bound.",
    ),
    click.option(
        "--target-itl-ms",
        type=PositiveNumber(),
        help="Cut prompts so that running streams get a token this often; default: no bound.",
    ),
    click.option(
        "--overlap/--no-overlap", default=True, help="Work on the host while the device computes."
    ),
    click.option(
        "--decode-steps",
        default=1,
        type=click.IntRange(1),
        help="Decode steps that the device runs at once while nobody waits; tokens come together.",
    ),
    click.option(
        "--num-speculative-tokens",
        default=0,
        type=click.IntRange(0, 64),
        help="Tokens that a request may guess from its own text, computed along; 0: none.",
    ),
    click.option(
        "--num-step-records",
        default=1024,
        type=click.IntRange(1),
        help="Steps that are kept for the dashboard.",
    ),
    click.option(
        "--step-timeout",
        default=300.0,
        type=Seconds(),
        help="Seconds after which a step hangs: /health turns 503. 0 never says so.",
    ),
)

SCHEDULING = (
    click.option(
        "--batching",
        default="continuous",
        type=click.Choice(get_args(BatchingMode)),
        help="Who joins when: anew before every step, or, as baselines, in closed batches.",
    ),
    click.option(
        "--batch-window-ms",
        default=50.0,
        type=PositiveNumber(),
        help="How long a dynamic batch waits to fill.",
    ),
    click.option(
        "--scheduling-policy",
        default="fair",
        type=click.Choice(get_args(SchedulingPolicy)),
        help="Who goes first: tenants by turns, the urgent, or who came first.",
    ),
    click.option(
        "--priority-aging-s",
        default=10.0,
        type=PositiveNumber(),
        help="Seconds of waiting that are worth one step of priority.",
    ),
    click.option(
        "--tenant-weight",
        multiple=True,
        type=TenantWeight(),
        metavar="NAME=W",
        callback=_tenant_weights,
        help="Share of a tenant where the others have 1; may be repeated.",
    ),
    click.option(
        "--max-num-queued-reqs",
        default=1024,
        type=click.IntRange(0),
        help="Requests that may wait; beyond, new ones get 429.",
    ),
    click.option(
        "--max-num-queued-tokens",
        default=1 << 20,
        type=click.IntRange(1),
        help="Prompt tokens that may wait, likewise.",
    ),
    click.option(
        "--queue-timeout",
        default=300.0,
        type=Seconds(),
        help="Seconds within which a request must start unless it says otherwise; one that would "
        "not, by the backlog, gets 429 at once. 0 lets it wait for ever.",
    ),
)

KV_CACHE = (
    click.option(
        "--kv-cache-dtype",
        default="auto",
        type=click.Choice([*get_args(KVCacheDtype), *KV_CACHE_DTYPE_ALIASES]),
        callback=_kv_cache_dtype,
        help="Of the KV cache; auto takes --dtype, fp8 is fp8_e4m3.",
    ),
    click.option(
        "--attention-kernel",
        default="auto",
        type=click.Choice(get_args(WantedKernel)),
        help="What attends over the KV cache; auto takes the fastest that works here. "
        "On CPUs native has packed weights besides.",
    ),
    click.option(
        "--keep-codes/--no-keep-codes",
        default=True,
        help="Keep what a GGUF file has in Q4_0, Q4_1 or Q8_0 as it is, beside the weights in "
        "bfloat16: steps of few tokens are quicker, on CPUs with AVX-512 for bfloat16.",
    ),
    click.option(
        "--block-size",
        type=click.Choice([8, 16, 32, 64, 128]),
        help="Tokens of a KV block. [default: 32 on a CPU, else 16]",
    ),
    click.option(
        "--kv-cache-memory-bytes",
        type=ByteSize(),
        help="Size of the KV cache, such as 2G. [default: 1G, at most a quarter of the memory]",
    ),
    click.option(
        "--kv-cache-memory-share",
        type=Share(),
        help="Its size as a share of the memory instead: 0.3 or 30%.",
    ),
    click.option("--num-kv-blocks", type=click.IntRange(1), help="Its size in blocks instead."),
    click.option(
        "--watermark",
        default="1%",
        type=Watermark(),
        help="What admission leaves free of it: a share (0.01 or 1%) or a number of blocks.",
    ),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        help="Reuse what prompts have in common.",
    ),
)

DEVICES = (
    click.option(
        "--tensor-parallel-size",
        default=1,
        type=click.IntRange(1, 1024),
        help="Devices that share the model: each has a part of the heads and of the KV cache.",
    ),
    click.option(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="Where several processes meet that share the model: an address of process 0.",
    ),
    click.option("--num-processes", type=click.IntRange(1), help="How many there are."),
    click.option(
        "--process-id",
        type=click.IntRange(0),
        help="Which this is. Process 0 serves, the others follow it; all get the same options.",
    ),
)

GATEWAY = (
    click.option(
        "--chat-template",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Template to use instead of the model's.",
    ),
    click.option(
        "--tool-call-parser",
        default="auto",
        type=click.Choice(get_args(ToolParserName)),
        help="How the model writes calls of tools; auto reads it off the chat template.",
    ),
    click.option(
        "--reasoning-parser",
        default="auto",
        type=click.Choice(get_args(ReasoningFormat)),
        help="How it marks its thoughts, likewise; none leaves them in the text.",
    ),
    click.option(
        "--metrics-prefix",
        default=METRICS_PREFIX,
        type=click.Choice(["headrace", "vllm"]),
        help="vllm exports vLLM's names as well.",
    ),
    click.option(
        "--shutdown-timeout",
        default=30.0,
        type=Seconds(),
        help="Seconds that running requests may go on after SIGTERM.",
    ),
    click.option(
        "--sse-keep-alive-interval",
        default=15.0,
        type=Seconds(),
        help="Seconds of silence before a comment is sent; 0 never sends one.",
    ),
)


def serve_options[F: Callable[..., object]](command: F) -> F:
    """Add the options to a command that takes the fields of ServeOptions."""
    for option in reversed((*WHERE, *STEPS, *SCHEDULING, *KV_CACHE, *DEVICES, *GATEWAY, *DOOR)):
        command = option(command)
    return command


def as_options(message: str) -> str:
    """Spell the fields of a configuration that a message names as options."""
    options = ServeOptions.__annotations__

    def as_option(match: re.Match[str]) -> str:
        field = match[0]
        names = (OPTION_OF_FIELD.get(field), field, field.removesuffix("s"))
        for name in (*names, field.removesuffix("_s")):
            if name in options:
                return "--" + name.replace("_", "-")
        return field

    return re.sub(r"[a-z]+(?:_[a-z]+)+", as_option, message)
