"""`headrace bench`: the measuring commands, each imported only when it is called."""

from collections.abc import Mapping

import click

from gateway.cli import CommandEntry, LazyGroup

__all__ = ["bench"]

COMMANDS: Mapping[str, CommandEntry] = {
    "serve": CommandEntry("bench.serve:serve", "Load any OpenAI-compatible server."),
    "startup": CommandEntry("bench.startup:startup", "Time from start to ready, cold and warm."),
    "policies": CommandEntry(
        "bench.policies:policies", "Continuous against dynamic and static batching."
    ),
    "interference": CommandEntry(
        "bench.interference:interference", "Running streams beside a very long prompt."
    ),
    "fairness": CommandEntry("bench.fairness:fairness", "Light tenants beside one that floods."),
    "prefix": CommandEntry("bench.prefix:prefix", "Prefix caching without hits and with many."),
    "speculation": CommandEntry(
        "bench.speculation:speculation", "Answers that copy, and that do not, with guesses or not."
    ),
    "overload": CommandEntry("bench.overload:overload", "Twice as many requests as it can bear."),
    "peers": CommandEntry("bench.peers:peers", "The same work for other servers, side by side."),
    "simulate": CommandEntry("bench.simulate:simulate", "Plan a fleet without any device."),
    "gateway": CommandEntry("bench.gateway:gateway", "What a token costs on its way out."),
    "scheduler": CommandEntry("bench.scheduler:scheduler", "Host time of a scheduling step."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def bench() -> None:
    """Measure a server, or the start of one."""
