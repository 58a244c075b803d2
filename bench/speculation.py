"""`headrace bench speculation`: what guessing from the prompt gains, and costs where it is no use.

Chats whose answers copy a list from the prompt, and chats whose answers are written freely, for
servers with and without `--num-speculative-tokens`, by turns.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median

import click

from bench.own_server import BenchSetup, measuring_command
from bench.report import print_rows
from bench.scenario import PlannedRequest, ScenarioRun, Sender
from bench.summary import LoadLevel
from bench.workload import WORDS

__all__ = ["speculation"]

KINDS = ("copied", "written")
HEADINGS = ("answers", "guesses", "output tok/s", "on over off", "guessed", "accepted")
LIST_LINES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationPlan:
    """What is sent.

    Attributes:
        num_guesses: `--num-speculative-tokens` of the servers that guess.
        num_streams: chats at a time.
        num_requests: chats of either kind for each server.
        output_len: tokens of each answer.
    """

    num_guesses: int
    num_streams: int
    num_requests: int
    output_len: int
    seed: int

    def flags(self, is_on: bool) -> list[str]:
        """Of a server that guesses, or does not."""
        return ["--num-speculative-tokens", str(self.num_guesses if is_on else 0)]

    def requests(self, kind: str) -> list[PlannedRequest]:
        """The chats of a kind; the same ones for every server."""
        return [
            PlannedRequest(prompt=self.prompt(kind, index), output_len=self.output_len)
            for index in range(self.num_requests)
        ]

    def prompt(self, kind: str, index: int) -> str:
        """What the user says in one chat."""
        source = random.Random(f"{self.seed}/{kind}/{index}")
        if kind == "written":
            first, second = source.sample(WORDS, 2)
            return f"Write a long story about a {first} and a {second}."
        lines = [
            f"{number}. {source.choice(WORDS)} {source.choice(WORDS)}, {source.randrange(2, 99)} "
            f"pieces, for {source.choice(WORDS)}"
            for number in range(1, LIST_LINES + 1)
        ]
        return "Repeat this list word for word:\n\n" + "\n".join(lines)


async def measure(sender: Sender, plan: SpeculationPlan) -> dict[str, ScenarioRun]:
    """All chats on one server, one kind after the other."""
    chats = replace(sender, target=replace(sender.target, endpoint="chat"))
    level = LoadLevel(concurrency=plan.num_streams)
    runs = {}
    for kind in KINDS:
        planned = plan.requests(kind)
        await chats.warm_up(planned[:1])
        runs[kind] = await chats.measure(planned, level)
    return runs


def speed(run: ScenarioRun) -> float:
    """Output tokens per second."""
    return run.summary.output_tokens_per_s or 0.0


@measuring_command(quick={"rounds": 1, "num_requests": 2, "output_len": 16})
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Servers of each kind; on and off take turns in going first.",
)
@click.option("--num-guesses", type=click.IntRange(1), default=8, show_default=True)
@click.option("--num-streams", type=click.IntRange(1), default=1, show_default=True)
@click.option("--num-requests", type=click.IntRange(1), default=8, show_default=True)
@click.option("--output-len", type=click.IntRange(2), default=128, show_default=True)
def speculation(
    setup: BenchSetup,
    *,
    rounds: int,
    num_guesses: int,
    num_streams: int,
    num_requests: int,
    output_len: int,
) -> None:
    """Measure guessing from the prompt, where answers copy and where they do not.

    SERVE_ARGUMENTS go to every server.
    """
    plan = SpeculationPlan(
        num_guesses=num_guesses,
        num_streams=num_streams,
        num_requests=num_requests,
        output_len=output_len,
        seed=setup.seed,
    )
    runs: dict[bool, list[dict[str, ScenarioRun]]] = {True: [], False: []}
    for round_number in range(rounds):
        for is_on in (True, False) if round_number % 2 == 0 else (False, True):
            found = setup.measure(plan.flags(is_on), partial(measure, plan=plan))
            for run in found.values():
                setup.check(run.records)
            runs[is_on].append(found)
    ratios = {kind: on_over_off(runs, kind) for kind in KINDS}
    rows = [row for kind in KINDS for row in rows_of(runs, kind, median(ratios[kind]))]
    print_rows(setup.console, HEADINGS, rows, title=f"{num_streams} at a time, in the median")
    setup.finish(
        {**asdict(plan), "rounds": rounds},
        {
            "on_over_off": ratios,
            "loads": {
                name: [
                    {
                        kind: {
                            **run.summary.as_dict(),
                            "draft_tokens": run.counters.draft_tokens,
                            "accepted_draft_tokens": run.counters.accepted_draft_tokens,
                        }
                        for kind, run in found.items()
                    }
                    for found in runs[is_on]
                ]
                for name, is_on in (("on", True), ("off", False))
            },
        },
    )


def on_over_off(runs: dict[bool, list[dict[str, ScenarioRun]]], kind: str) -> list[float]:
    """How much faster tokens came with guesses, in every round."""
    return [
        speed(on[kind]) / speed(off[kind]) if speed(off[kind]) else float("nan")
        for on, off in zip(runs[True], runs[False], strict=True)
    ]


def rows_of(
    runs: dict[bool, list[dict[str, ScenarioRun]]], kind: str, ratio: float
) -> Sequence[Sequence[str]]:
    """For the table of HEADINGS: with guesses, and without."""
    drafted = sum(found[kind].counters.draft_tokens for found in runs[True])
    accepted = sum(found[kind].counters.accepted_draft_tokens for found in runs[True])
    speeds = {is_on: median(speed(found[kind]) for found in runs[is_on]) for is_on in runs}
    share = f"{accepted / drafted:.0%}" if drafted else "-"
    return [
        [kind, "on", f"{speeds[True]:.1f}", f"{ratio:.2f}", f"{drafted:.0f}", share],
        [kind, "off", f"{speeds[False]:.1f}", "", "", ""],
    ]
