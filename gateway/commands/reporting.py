"""How a command that takes long tells about it, in a terminal and in a log file."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress_bar", "warnings_in_the_log"]

logger = logging.getLogger(__name__)


@contextmanager
def progress_bar(console: Console, title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that takes (done, in all): a bar in a terminal, one line in a log."""
    bar = Progress(
        TextColumn(f"{title:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    task = bar.add_task(title, total=None)
    start_s = time.monotonic()

    def draw(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()  # only one bar can be live at a time

    def say(done: int, total: int) -> None:
        if done == total:
            console.print(f"{title}: {total} {unit} in {time.monotonic() - start_s:.1f} s")

    try:
        yield draw if console.is_interactive else say
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def warnings_in_the_log() -> Iterator[None]:
    """Make each warning of a library one line of the log."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        logger.warning("%s", " ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
