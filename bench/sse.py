"""Server-sent events from raw bytes, by the grammar of the HTML standard.

Written here, not taken from the gateway or an SDK: a measuring tool must not share mistakes with
what it measures. Line ends are LF, CR or CRLF; events end at a blank line; comments (keep-alives)
and events without data are skipped; an event that the stream cuts off is dropped, as the standard
says.
"""

__all__ = ["EventStreamParser"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventStreamParser:
    """Feed it whatever the socket gave; it returns the data of each event that became complete."""

    def __init__(self) -> None:
        self._pending = b""  # the start of a line whose end has not come
        self._data: list[bytes] = []
        self._at_start = True
        self._skip_line_feed = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes of the stream.

        Returns:
            The data of every event that they complete, lines joined by LF, in order.
        """
        if self._skip_line_feed and chunk:
            # The last chunk ended in CR, which ended its line; this LF belongs to it.
            self._skip_line_feed = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        chunk = self._pending + chunk
        if self._at_start:
            if len(chunk) < len(BYTE_ORDER_MARK) and BYTE_ORDER_MARK.startswith(chunk):
                self._pending = chunk
                return []
            self._at_start = False
            chunk = chunk.removeprefix(BYTE_ORDER_MARK)
        # bytes.splitlines knows exactly LF, CR and CRLF; str.splitlines knows more.
        lines = chunk.splitlines(keepends=True)
        self._pending = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._pending = lines.pop()
        elif lines and lines[-1].endswith(b"\r"):
            self._skip_line_feed = True
        events: list[bytes] = []
        for line in lines:
            self._take_line(line.rstrip(b"\r\n"), events)
        return events

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                data = b"\n".join(self._data)
                self._data.clear()
                if data:
                    events.append(data)
            return
        name, _, value = line.partition(b":")
        if name == b"data":  # a comment has the empty name; event, id and retry do not matter here
            self._data.append(value.removeprefix(b" "))
