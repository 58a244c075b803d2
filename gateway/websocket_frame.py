"""Frames of the websocket protocol as a server sends them (RFC 6455, 5.2).

aiohttp makes and sends them one by one. Here are those that are sent many at a time.
"""

import struct

__all__ = ["encode_frame"]

FINAL = 0x80  # not continued by another
_MEDIUM, _LONG = struct.Struct("!BBH"), struct.Struct("!BBQ")


def encode_frame(payload: bytes, opcode: int) -> bytes:
    """Return a whole message as one frame, neither masked nor compressed."""
    size = len(payload)
    if size < 126:
        return bytes((FINAL | opcode, size)) + payload
    if size < 1 << 16:
        return _MEDIUM.pack(FINAL | opcode, 126, size) + payload
    return _LONG.pack(FINAL | opcode, 127, size) + payload
