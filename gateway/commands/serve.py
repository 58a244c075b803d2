"""`headrace serve`: the composition root, the only module that sees both gateway and device engine.

Resolve the model, load it, compile everything, listen, and stop in good order.
"""

import asyncio
import logging
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import jax
from rich.console import Console

from gateway.chat_template import ChatTemplate
from gateway.commands.address import (
    check_address,
    prepare_port_file,
    reason,
    write_port_file,
)
from gateway.commands.models import download_bar
from gateway.commands.option_types import ByteSize, Seconds
from gateway.commands.reporting import progress_bar, warnings_in_the_log
from gateway.config import METRICS_PREFIX, GatewayConfig
from gateway.diagnosis import compile_cache_dir
from gateway.generation import TextGenerator
from gateway.machine import read_machine
from gateway.metrics import Metrics
from gateway.server import Server
from gateway.tokenizer import Tokenizer
from jaxengine.build import BuiltEngine, EngineOptions, build_engine
from jaxengine.config import EngineConfig
from jaxengine.weights.checkpoint import open_checkpoint
from jaxengine.weights.source import DEFAULT_ALIAS, cache_dir, resolve_model

__all__ = ["serve"]

logger = logging.getLogger(__name__)

GIB = 1 << 30


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE", "show_default": True})
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--port-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the port here once we listen.",
)
@click.option("--served-model-name", multiple=True, help="Name in requests; may be repeated.")
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float32"]))
@click.option("--max-model-len", type=click.IntRange(2), help="Context; default: the model's.")
@click.option("--max-num-seqs", default=64, type=click.IntRange(1, 4096), help="Running requests.")
@click.option(
    "--max-num-batched-tokens",
    default=512,
    type=click.IntRange(8, 65536),
    help="Tokens that a step can hold.",
)
@click.option(
    "--max-num-scheduled-tokens",
    type=click.IntRange(1),
    help="Tokens that the scheduler puts into a step; default: what it can hold.",
)
@click.option(
    "--max-num-queued-reqs",
    default=1024,
    type=click.IntRange(0),
    help="Requests that may wait; beyond, new ones get 429.",
)
@click.option("--block-size", default="16", type=click.Choice(["8", "16", "32", "64", "128"]))
@click.option(
    "--kv-cache-memory-bytes",
    type=ByteSize(),
    help="Size of the KV cache, such as 2G. [default: 1G, at most a quarter of the memory]",
)
@click.option("--num-kv-blocks", type=click.IntRange(1), help="Its size in blocks instead.")
@click.option(
    "--watermark",
    default=0.01,
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of the blocks kept free at admission.",
)
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True)
@click.option(
    "--overlap/--no-overlap", default=True, help="Work on the host while the device computes."
)
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--allowed-origin", multiple=True, help="Web origin that may call us.")
@click.option("--allowed-host", multiple=True, help="Further name in the Host header.")
@click.option("--metrics-prefix", default=METRICS_PREFIX, type=click.Choice(["headrace", "vllm"]))
@click.option(
    "--shutdown-timeout",
    default=30.0,
    type=Seconds(),
    help="Seconds that running requests may go on after SIGTERM.",
)
@click.option(
    "--sse-keep-alive-interval",
    default=15.0,
    type=Seconds(),
    help="Seconds of silence before a comment is sent; 0 never sends one.",
)
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"])
)
def serve(
    *,
    model: str | None,
    host: str,
    port: int,
    port_file: Path | None,
    served_model_name: tuple[str, ...],
    dtype: str,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_num_scheduled_tokens: int | None,
    max_num_queued_reqs: int,
    block_size: str,
    kv_cache_memory_bytes: int | None,
    num_kv_blocks: int | None,
    watermark: float,
    enable_prefix_caching: bool,
    overlap: bool,
    chat_template: Path | None,
    allowed_origin: tuple[str, ...],
    allowed_host: tuple[str, ...],
    metrics_prefix: str,
    shutdown_timeout: float,
    sse_keep_alive_interval: float,
    log_level: str,
) -> None:
    """Serve MODEL over websocket, SSE and OpenAI-compatible HTTP.

    MODEL is a directory (config.json, tokenizer.json, *.safetensors), a .gguf file, a hub id, or
    an alias of `headrace models list`. Without it, the default model is fetched once and served.

    Every option can be set as HEADRACE_<OPTION> in the environment.
    """
    start_s = time.monotonic()
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # JAX tells at length which accelerators it did not find; `headrace doctor` says it better.
    logging.getLogger("jax").setLevel(logging.WARNING)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    options = EngineOptions(
        dtype="float32" if dtype == "float32" else "bfloat16",
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_scheduled_tokens=max_num_scheduled_tokens,
        max_num_seqs=max_num_seqs,
        max_num_queued_requests=max_num_queued_reqs,
        block_size=int(block_size),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_kv_blocks=num_kv_blocks,
        watermark=watermark,
        enable_prefix_caching=enable_prefix_caching,
        overlap=overlap,
    )
    # What can be refused at once is not refused after minutes of loading.
    check_address(host, port)
    if port_file is not None:
        prepare_port_file(port_file)
    source = None if chat_template is None else _read_template(chat_template)
    with download_bar(model or DEFAULT_ALIAS) as progress:
        files = resolve_model(model, progress=progress)
    try:
        config = GatewayConfig(
            host=host,
            port=port,
            served_model_names=served_model_name or (files.name,),
            allowed_origins=allowed_origin,
            allowed_hosts=allowed_host,
            metrics_prefix=metrics_prefix,
            shutdown_timeout_s=shutdown_timeout,
            sse_keep_alive_interval_s=sse_keep_alive_interval or None,
        )
    except ValueError as error:
        raise _usage_error(error) from error

    _use_compile_cache()
    checkpoint = open_checkpoint(files)
    tokenizer = Tokenizer.from_model(files)
    template = ChatTemplate.from_model(files, source=source)
    with (
        warnings_in_the_log(),
        progress_bar(console, "loading weights", "tensors") as weights,
        progress_bar(console, "compiling", "programs") as compiling,
    ):
        try:
            built = build_engine(
                checkpoint,
                options,
                memory_bytes=read_machine().memory_bytes or 4 * GIB,
                eos_token_ids=tokenizer.eos_ids,
                weights_progress=weights,
                compile_progress=compiling,
            )
        except ValueError as error:
            raise _usage_error(error) from error
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise click.ClickException(
                "there is not enough memory for the weights and the KV cache; "
                "try a smaller --kv-cache-memory-bytes or --num-kv-blocks"
            ) from error
    _describe(console, files.name, built)

    metrics = Metrics(config.model_name, prefix=metrics_prefix)
    generator = TextGenerator(built.engine, tokenizer, template, config=config, metrics=metrics)

    def on_listening(server: Server) -> None:
        if port_file is not None:
            write_port_file(port_file, server.port)
        console.print(f"ready after {time.monotonic() - start_s:.1f} s")
        console.print(f"  chat page   {server.url}/")
        console.print(f"  OpenAI API  {server.url}/v1")
        console.print(f"  websocket   {server.url.replace('http', 'ws', 1)}/v1/stream")
        console.print(f"  metrics     {server.url}/metrics")

    asyncio.run(_serve(Server(config, generator, metrics), built, on_listening))


async def _serve(
    server: Server, built: BuiltEngine, on_listening: Callable[[Server], None]
) -> None:
    """Listen until SIGTERM or SIGINT, then drain; a second signal does not wait."""
    signalled = asyncio.Event()
    signalled_again = asyncio.Event()

    def on_signal() -> None:
        (signalled_again if signalled.is_set() else signalled).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await server.start()  # first, so that a port taken meanwhile costs no running engine
    except OSError as error:
        raise click.ClickException(f"cannot listen: {reason(error)}") from error
    built.engine.start()
    on_listening(server)
    await signalled.wait()
    logger.info("stopping; running requests may finish")
    draining = asyncio.create_task(server.stop())
    impatient = asyncio.create_task(signalled_again.wait())
    await asyncio.wait({draining, impatient}, return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    if not draining.done():
        await built.engine.stop(drain_timeout_s=0)
    await draining


def _usage_error(error: ValueError) -> click.UsageError:
    """Say what a configuration complains of, with its fields spelled as options."""
    options = {parameter.name for parameter in serve.params}

    def as_option(match: re.Match[str]) -> str:
        for name in (match[0], match[0].removesuffix("s"), match[0].removesuffix("_s")):
            if name in options:
                return "--" + name.replace("_", "-")
        return match[0]

    return click.UsageError(re.sub(r"[a-z]+(?:_[a-z]+)+", as_option, str(error)))


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read --chat-template {path}: {error}") from error


def _use_compile_cache() -> None:
    """Keep compiled programs between runs: a warm start loads them instead of compiling."""
    directory = compile_cache_dir(cache_dir())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        logger.warning(
            "every start will compile: programs cannot be kept in %s: %s", directory, reason(error)
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _describe(console: Console, name: str, built: BuiltEngine) -> None:
    """Say what was decided: what an operator needs to know about capacity."""
    config: EngineConfig = built.config
    capacity = config.kv_capacity_tokens
    device = jax.devices()[0]
    console.print(f"model {name} ({built.model.family}), {config.dtype}, on {device.device_kind}")
    if built.clamped_from is not None:
        console.print(
            f"max_model_len is {config.max_model_len}, not {built.clamped_from}: "
            "the KV cache holds no more; see --kv-cache-memory-bytes"
        )
    console.print(
        f"KV cache {capacity:,} tokens in {config.num_blocks - 1:,} blocks of {config.block_size}; "
        f"{capacity / config.max_model_len:.1f} requests at the full length of "
        f"{config.max_model_len:,} tokens"
    )
    console.print(
        f"steps of up to {config.max_num_batched_tokens} tokens and {config.max_num_seqs} "
        f"requests; {built.num_buckets} buckets compiled, nothing is compiled from here on"
    )
