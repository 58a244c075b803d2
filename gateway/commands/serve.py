"""`headrace serve`: the composition root, the only module that sees both gateway and device engine.

Resolve the model, load it, compile everything, listen, and stop in good order.
"""

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Unpack

import click
import jax
from rich.console import Console
from rich.table import Table

from gateway.chat_template import ChatTemplate
from gateway.commands.address import (
    check_address,
    check_loopback,
    prepare_port_file,
    reason,
    write_port_file,
)
from gateway.commands.door import Door
from gateway.commands.memory_table import MemoryPart, memory_table
from gateway.commands.models import download_bar
from gateway.commands.reporting import progress_bar, warnings_in_the_log
from gateway.commands.serve_options import ServeOptions, as_options, serve_options
from gateway.config import GatewayConfig
from gateway.diagnosis import compile_cache_dir
from gateway.event_loop import loop_factory, settle_garbage_collector
from gateway.generation import TextGenerator
from gateway.log_format import configure_logging
from gateway.machine import read_machine
from gateway.metrics import Metrics
from gateway.server import Server
from gateway.tokenizer import Tokenizer
from jaxengine.build import BuiltEngine, build_engine
from jaxengine.config import EngineConfig
from jaxengine.engine_options import EngineOptions
from jaxengine.host_memory import keep_freed_memory
from jaxengine.host_threads import put_device_threads_behind
from jaxengine.kv_cache import resolve_kv_cache_dtype
from jaxengine.processes import ProcessGroup, ProcessOptions
from jaxengine.weights.checkpoint import open_checkpoint
from jaxengine.weights.source import DEFAULT_ALIAS, cache_dir, resolve_model
from kernels_pallas.gpu_graphs import prepare_for_gpu

__all__ = ["device_memory_bytes", "serve"]

logger = logging.getLogger(__name__)

UNKNOWN_MEMORY_BYTES = 4 << 30


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE", "show_default": True})
@click.argument("model", required=False)
@serve_options
def serve(model: str | None, **options: Unpack[ServeOptions]) -> None:
    """Serve MODEL over websocket, SSE and OpenAI-compatible HTTP.

    MODEL is a directory (config.json, tokenizer.json, *.safetensors), a .gguf file, a hub id, or
    an alias of `headrace models list`. Without it, the default model is fetched once and served.

    Every option can be set as HEADRACE_<OPTION> in the environment.
    """
    start_s = time.monotonic()
    prepare_for_gpu(os.environ)
    configure_logging(options["log_level"], options["log_format"])
    # JAX tells at length which accelerators it did not find; `headrace doctor` says it better.
    logging.getLogger("jax").setLevel(logging.WARNING)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    door = Door(options)
    engine_options = _engine_options(options, door.tenant_weights)
    process_options = _process_options(options)
    # What can be refused at once is not refused after minutes of loading.
    if process_options is None or process_options.process_id == 0:
        check_address(options["host"], options["port"])
    if door.key_ring.is_open and not options["allow_unauthenticated"]:
        check_loopback(options["host"])
    port_file, chat_template = options["port_file"], options["chat_template"]
    if port_file is not None:
        prepare_port_file(port_file)
    source = None if chat_template is None else _read_template(chat_template)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    with download_bar(model or DEFAULT_ALIAS) as progress:
        files = resolve_model(model, progress=progress)
    config = _gateway_config(options, model_name=files.name)
    keep_freed_memory()
    group = _join(console, process_options)
    put_device_threads_behind()
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
                engine_options,
                memory_bytes=_memory_bytes(engine_options, group),
                eos_token_ids=tokenizer.eos_ids,
                weights_progress=weights,
                compile_progress=compiling,
                programs_dir=_programs_dir(),
                group=group,
            )
        except ValueError as error:
            raise click.UsageError(as_options(str(error))) from error
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise click.ClickException(
                "there is not enough memory for the weights and the KV cache; "
                "try a smaller --kv-cache-memory-bytes, or --kv-cache-dtype fp8"
            ) from error
    _describe(console, files.name, built)
    if group is not None and not group.leads:
        _follow(console, built, group)
        return

    metrics = Metrics(config.model_name, prefix=config.metrics_prefix)
    generator = TextGenerator(built.engine, tokenizer, template, config=config, metrics=metrics)

    def on_listening(server: Server) -> None:
        if port_file is not None:
            write_port_file(port_file, server.port)
        console.print(f"ready after {time.monotonic() - start_s:.1f} s")
        console.print(f"  {door.description}")
        console.print(f"  chat page   {server.url}/")
        console.print(f"  dashboard   {server.url}/dashboard")
        console.print(f"  OpenAI API  {server.url}/v1")
        console.print(f"  websocket   {server.url.replace('http', 'ws', 1)}/v1/stream")
        console.print(f"  metrics     {server.url}/metrics")

    server = Server(config, generator, metrics, keys=door.key_ring, tls=door.tls)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(server, built, door, on_listening))
    finally:
        built.runner.close()


async def _serve(
    server: Server, built: BuiltEngine, door: Door, on_listening: Callable[[Server], None]
) -> None:
    """Listen until SIGTERM or SIGINT, then drain; a second signal does not wait."""
    signalled = asyncio.Event()
    signalled_again = asyncio.Event()

    def on_signal() -> None:
        (signalled_again if signalled.is_set() else signalled).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, door.reload, built.engine)
    try:
        await server.start()  # first, so that a port taken meanwhile costs no running engine
    except OSError as error:
        raise click.ClickException(f"cannot listen: {reason(error)}") from error
    built.engine.start()
    settle_garbage_collector()
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


def _engine_options(options: ServeOptions, tenant_weights: Mapping[str, float]) -> EngineOptions:
    target_itl_ms = options["target_itl_ms"]
    try:
        return EngineOptions(
            dtype=options["dtype"],
            quantization=options["quantization"],
            kv_cache_dtype=options["kv_cache_dtype"],
            attention_kernel=options["attention_kernel"],
            keep_codes=options["keep_codes"],
            tensor_parallel_size=options["tensor_parallel_size"],
            max_model_len=options["max_model_len"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_num_scheduled_tokens=options["max_num_scheduled_tokens"],
            max_num_seqs=options["max_num_seqs"],
            long_prefill_token_threshold=options["long_prefill_token_threshold"],
            target_itl_s=None if target_itl_ms is None else target_itl_ms / 1000,
            batching=options["batching"],
            batch_window_s=options["batch_window_ms"] / 1000,
            scheduling_policy=options["scheduling_policy"],
            priority_aging_s=options["priority_aging_s"],
            tenant_weights=tenant_weights,
            max_num_queued_requests=options["max_num_queued_reqs"],
            max_num_queued_tokens=options["max_num_queued_tokens"],
            queue_timeout_s=options["queue_timeout"] or None,
            block_size=options["block_size"],
            kv_cache_memory_bytes=options["kv_cache_memory_bytes"],
            kv_cache_memory_share=options["kv_cache_memory_share"],
            num_kv_blocks=options["num_kv_blocks"],
            watermark=options["watermark"],
            enable_prefix_caching=options["enable_prefix_caching"],
            overlap=options["overlap"],
            decode_steps=options["decode_steps"],
            num_speculative_tokens=options["num_speculative_tokens"],
            num_step_records=options["num_step_records"],
            step_timeout_s=options["step_timeout"] or None,
        )
    except ValueError as error:
        raise click.UsageError(as_options(str(error))) from error


def _process_options(options: ServeOptions) -> ProcessOptions | None:
    """Return which process of several this is; None if it is the only one."""
    address, number, index = (
        options["coordinator_address"],
        options["num_processes"],
        options["process_id"],
    )
    if address is None and number is None and index is None:
        return None
    if address is None or number is None or index is None:
        raise click.UsageError(
            "give all of --coordinator-address, --num-processes and --process-id, or none"
        )
    try:
        return ProcessOptions(coordinator_address=address, num_processes=number, process_id=index)
    except ValueError as error:
        raise click.UsageError(as_options(str(error))) from error


def _join(console: Console, options: ProcessOptions | None) -> ProcessGroup | None:
    """Wait for the other processes, if there are any."""
    if options is None:
        return None
    console.print(
        f"process {options.process_id} of {options.num_processes} waits for the others "
        f"at {options.coordinator_address}"
    )
    try:
        return ProcessGroup(options)
    except ValueError as error:
        raise click.ClickException(as_options(str(error))) from error


def _follow(console: Console, built: BuiltEngine, group: ProcessGroup) -> None:
    """Run the steps of process 0 until it ends; a signal does not end it before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: logger.info("process 0 decides when to stop"))
    console.print(f"process {group.process_id} of {group.num_processes} follows process 0")
    try:
        built.runner.follow()
    except jax.errors.JaxRuntimeError as error:
        raise click.ClickException(f"process 0 is gone: {str(error).splitlines()[0]}") from error
    console.print("process 0 has ended")


def _gateway_config(options: ServeOptions, *, model_name: str) -> GatewayConfig:
    try:
        return GatewayConfig(
            host=options["host"],
            port=options["port"],
            served_model_names=options["served_model_name"] or (model_name,),
            allowed_origins=options["allowed_origin"],
            allowed_hosts=options["allowed_host"],
            metrics_prefix=options["metrics_prefix"],
            tool_call_parser=options["tool_call_parser"],
            reasoning_parser=options["reasoning_parser"],
            shutdown_timeout_s=options["shutdown_timeout"],
            sse_keep_alive_interval_s=options["sse_keep_alive_interval"] or None,
            max_body_bytes=options["max_body_bytes"],
            max_connections=options["max_connections"],
            ws_max_connections=options["max_websockets"],
            ws_idle_timeout_s=options["websocket_idle_timeout"],
            ws_max_age_s=options["websocket_max_age"],
            header_timeout_s=options["header_timeout"],
            body_read_timeout_s=options["body_timeout"],
            send_timeout_s=options["send_timeout"],
            resume_ttl_s=options["resume_ttl"],
            resume_total_bytes=options["resume_memory_bytes"],
            keepalive_timeout_s=options["keepalive_timeout"],
        )
    except ValueError as error:
        raise click.UsageError(as_options(str(error))) from error


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read --chat-template {path}: {error}") from error


def device_memory_bytes(device: jax.Device, *, num_sharing: int = 1) -> int:
    """Return the memory of a device.

    Args:
        device: one of this process.
        num_sharing: devices that share the machine's memory, where they have none of their own.
    """
    own: int | None = (device.memory_stats() or {}).get("bytes_limit")
    return own or (read_machine().memory_bytes or UNKNOWN_MEMORY_BYTES) // num_sharing


def _memory_bytes(options: EngineOptions, group: ProcessGroup | None) -> int:
    num_processes = 1 if group is None else group.num_processes
    num_local = max(options.tensor_parallel_size // num_processes, 1)
    return device_memory_bytes(jax.local_devices()[0], num_sharing=num_local)


def _programs_dir() -> Path | None:
    """Return where compiled programs are kept for the next start; None if they cannot be."""
    directory = compile_cache_dir(cache_dir())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # programs are code
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        logger.warning(
            "every start will compile: programs cannot be kept in %s: %s", directory, reason(error)
        )
        return None
    # Our programs include what JAX's own cache would do, and more; see program_store.
    jax.config.update("jax_compilation_cache_dir", None)
    return directory


def _describe(console: Console, name: str, built: BuiltEngine) -> None:
    """Say what was decided: what an operator needs to know about capacity."""
    config: EngineConfig = built.config
    capacity = config.kv_capacity_tokens
    kind: str = config.dtype
    if config.quantization is not None:
        kind += f" with weights in {config.quantization}"
    device, number = built.devices.devices[0].device_kind, built.devices.num_devices
    where = device if number == 1 else f"{number} devices ({device})"
    console.print(f"model {name} ({built.model.family}), {kind}, on {where}")
    if number > 1:
        shard = built.shard
        console.print(
            f"tensor parallel: each device has {shard.num_heads} of {built.model.num_heads} query "
            f"heads and {shard.num_kv_heads} of {built.model.num_kv_heads} kv heads; "
            "the memory below is that of one device"
        )
    if built.clamped_from is not None:
        console.print(
            f"max_model_len is {config.max_model_len}, not {built.clamped_from}: "
            "the KV cache holds no more; see --kv-cache-memory-bytes"
        )
    console.print(
        f"{config.batching} batching in steps of up to {config.max_num_batched_tokens} tokens and "
        f"{config.max_num_seqs} requests; {built.num_buckets} buckets compiled, "
        "nothing is compiled from here on"
    )
    console.print(f"attention kernel {built.attention.kernel}: {built.attention.reason}")
    console.print(
        f"KV cache for {capacity / config.max_model_len:.1f} requests at the full length of "
        f"{config.max_model_len:,} tokens"
    )
    console.print(_memory_table(built))


def _memory_table(built: BuiltEngine) -> Table:
    config, memory = built.config, built.memory
    cache_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, config.dtype)
    weights: str = config.dtype
    if config.quantization is not None:
        others = "embedding and head" if config.quantization == "fp8" else "the embedding"
        weights = f"{config.quantization}, {others} {config.dtype}"
    parts = (
        MemoryPart("weights", memory.weights, weights),
        MemoryPart("codes", memory.codes, "of the same weights, as stored, for few tokens"),
        MemoryPart(
            "KV cache",
            memory.kv_cache,
            f"{config.kv_capacity_tokens:,} tokens in {config.num_blocks - 1:,} blocks of "
            f"{config.block_size}, {cache_dtype}",
        ),
        MemoryPart("workspace", memory.workspace, "of the largest step, and shared by all"),
        MemoryPart("scratch", memory.scratch, "that the native library keeps"),
    )
    return memory_table([part for part in parts if part.size], available=memory.available)
