"""Whether a client takes what it is sent."""

import asyncio

__all__ = ["has_room"]

# asyncio lets writers wait from 64 KiB on, and then until no more than 16 KiB are left.
MAX_UNSENT_BYTES = 16 * 1024


def has_room(transport: asyncio.WriteTransport | None) -> bool:
    """Return whether a write now would not wait, unless it is a very large one.

    Whoever asks needs no timer for that write; one for each token would be dear.
    """
    return transport is not None and transport.get_write_buffer_size() <= MAX_UNSENT_BYTES
