"""`headrace doctor`: what this machine can run, and why.

Exit code 1 if no server can run here.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.config import GatewayConfig
from gateway.diagnosis import (
    SUPPORTED_VERSIONS,
    Check,
    can_serve,
    check_attention,
    check_cpu,
    check_devices,
    check_disk,
    check_folder,
    check_memory,
    check_package,
    check_port,
    check_python,
    compile_cache_dir,
    model_cache_dir,
)
from gateway.jax_probe import JaxProbe, probe_jax
from gateway.machine import Machine, read_machine

__all__ = ["diagnose", "doctor"]

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def diagnose(machine: Machine, probe: JaxProbe) -> list[Check]:
    """Every check, in the order in which one would ask."""
    checks = [check_python(machine), check_cpu(machine), check_memory(machine)]
    checks += [check_package(name) for name in SUPPORTED_VERSIONS]
    checks.append(check_devices(probe))
    if (folder := model_cache_dir()) is not None:
        checks.append(check_attention(probe, folder))
        models, compiled = folder / "models", compile_cache_dir(folder)
        checks += [
            check_folder("models", models, "the default model will be downloaded: 93 MB"),
            check_folder("compiled", compiled, "the first start compiles everything"),
            check_disk(folder),
        ]
    checks.append(check_port(GatewayConfig().port))
    return checks


def make_verdict(checks: Sequence[Check]) -> str:
    """The answer in one sentence."""
    if not can_serve(checks):
        missing = ", ".join(check.name for check in checks if check.status == "fail")
        return f"This machine cannot serve yet: {missing}. The client works without."
    warnings = sum(check.status == "warn" for check in checks)
    notes = f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    return f"This machine can run headrace serve{notes}."


def make_document(machine: Machine, probe: JaxProbe, checks: Sequence[Check]) -> dict[str, Any]:
    """All of it for programs."""
    return {
        "can_serve": can_serve(checks),
        "verdict": make_verdict(checks),
        "machine": asdict(machine),
        "jax": asdict(probe),
        "checks": [asdict(check) for check in checks],
    }


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """All of it for people."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in checks:
        # As objects, not markup: "headrace[serve]" would lose its brackets.
        text = Text(check.value)
        if check.why:
            text.append(f"\n{check.why}", style="dim")
        table.add_row(Text(check.status, style=STYLES[check.status]), check.name, text)
    console.print(table)
    console.print(Text(make_verdict(checks), style="bold"))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that JAX has to name its devices.",
)
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool, timeout_s: float) -> None:
    """Say what this machine can run, and why. Exit code 1 if it cannot serve."""
    machine = read_machine()
    probe = probe_jax(timeout_s)
    checks = diagnose(machine, probe)
    if as_json:
        document = orjson.dumps(make_document(machine, probe, checks), option=orjson.OPT_INDENT_2)
        click.echo(document.decode())
    else:
        print_checks(Console(), checks)
    if not can_serve(checks):
        ctx.exit(1)
