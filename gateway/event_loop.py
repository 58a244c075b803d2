"""The event loop that serves, and the garbage collector beside it."""

import asyncio
import gc
import importlib.util
from collections.abc import Callable

__all__ = ["loop_factory", "settle_garbage_collector"]

# Objects that may be new before it looks for cycles among them; a step of 1,000 streams has
# thousands, which go by themselves. By default it looks after 700.
MAX_NEW_OBJECTS = 20_000


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the loop: uvloop where it is installed, for it takes less time."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def settle_garbage_collector() -> None:
    """Let collecting take next to no time of a step; call it when everything is loaded.

    What is there now stays, and is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_NEW_OBJECTS)
