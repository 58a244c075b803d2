"""`headrace serve`: the composition root, the only module that sees both gateway and device engine.

Resolve the model, load it, compile everything, listen, and stop in good order.
"""

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.chat_template import ChatTemplate
from gateway.commands.models import download_bar
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
from jaxengine.weights.source import cache_dir, resolve_model

__all__ = ["serve"]

GIB = 1 << 30


class ByteSize(click.ParamType[int]):
    """A number of bytes: 1073741824, 512M, 1G, 1.5GiB."""

    name = "bytes"
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().lower().removesuffix("b").removesuffix("i")
        number, unit = (text[:-1], text[-1:]) if text[-1:].isalpha() else (text, "")
        try:
            size = int(float(number) * self.units[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a number of bytes such as 512M or 1G", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is not positive", param, ctx)
        return size


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE", "show_default": True})
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--port-file", type=click.Path(path_type=Path), help="Write the port here.")
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
    type=click.FloatRange(0),
    help="Seconds that running requests may go on after SIGTERM.",
)
@click.option(
    "--sse-keep-alive-interval",
    default=15.0,
    type=click.FloatRange(0),
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
    with download_bar(model or "default model") as progress:
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
        raise click.UsageError(str(error)) from error

    _use_compile_cache()
    checkpoint = open_checkpoint(files)
    tokenizer = Tokenizer.from_model(files)
    source = chat_template.read_text(encoding="utf-8") if chat_template else None
    template = ChatTemplate.from_model(files, source=source)
    with _bar(console, "loading weights") as weights, _bar(console, "compiling") as compiling:
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
            raise click.UsageError(str(error)) from error
    _describe(console, files.name, built)

    metrics = Metrics(config.model_name, prefix=metrics_prefix)
    generator = TextGenerator(built.engine, tokenizer, template, config=config, metrics=metrics)

    def on_listening(server: Server) -> None:
        if port_file is not None:
            _write_atomically(port_file, str(server.port))
        console.print(f"ready after {time.monotonic() - start_s:.1f} s")
        console.print(f"  chat page   {server.url}/")
        console.print(f"  OpenAI API  {server.url}/v1")
        console.print(f"  websocket   {server.url.replace('http', 'ws', 1)}/v1/stream")
        console.print(f"  metrics     {server.url}/metrics")

    try:
        asyncio.run(_serve(Server(config, generator, metrics), built, on_listening))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error


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
    await server.start()  # first, so that a taken port costs no running engine
    built.engine.start()
    on_listening(server)
    await signalled.wait()
    logging.getLogger(__name__).info("stopping; running requests may finish")
    draining = asyncio.create_task(server.stop())
    impatient = asyncio.create_task(signalled_again.wait())
    await asyncio.wait({draining, impatient}, return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    if not draining.done():
        await built.engine.stop(drain_timeout_s=0)
    await draining


def _use_compile_cache() -> None:
    """Keep compiled programs between runs: a warm start loads them instead of compiling."""
    directory = compile_cache_dir(cache_dir())
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def _bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback that draws a bar once it is first called."""
    bar = Progress(
        TextColumn(f"{title:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    task = bar.add_task(title)

    def report(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    try:
        yield report
    finally:
        bar.stop()


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


def _write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
    os.replace(temporary, path)
