"""The options of `headrace serve` that say who may come in, and how much a client may take."""

from pathlib import Path
from typing import TypedDict

import click

from gateway.commands.option_types import ByteSize, PositiveNumber
from gateway.log_format import LOG_FORMATS, LogFormat

__all__ = ["DOOR", "DoorOptions"]


class DoorOptions(TypedDict):
    """What the command line gives. Names as on the command line, units as there."""

    api_key: tuple[str, ...]
    api_keys_file: Path | None
    allow_unauthenticated: bool
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    allowed_origin: tuple[str, ...]
    allowed_host: tuple[str, ...]
    max_body_bytes: int
    max_connections: int
    max_websockets: int
    websocket_idle_timeout: float
    websocket_max_age: float
    header_timeout: float
    body_timeout: float
    send_timeout: float
    resume_ttl: float
    resume_memory_bytes: int
    keepalive_timeout: float
    log_level: str
    log_format: LogFormat


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

DOOR = (
    click.option(
        "--api-key",
        multiple=True,
        help="Key that a client must bring; may be repeated. Better HEADRACE_API_KEY, which no "
        "process list shows, or a file.",
    ),
    click.option(
        "--api-keys-file",
        type=_FILE,
        help="Keys that clients must bring, with tenants and limits, as `headrace keys` writes "
        "them; read again on SIGHUP.",
    ),
    click.option(
        "--allow-unauthenticated",
        is_flag=True,
        help="Listen on an address that others can reach although no key is needed.",
    ),
    click.option(
        "--ssl-certfile",
        type=_FILE,
        help="Certificate chain (PEM) to speak TLS with; read again on SIGHUP.",
    ),
    click.option("--ssl-keyfile", type=_FILE, help="Its private key, if the certfile has none."),
    click.option("--allowed-origin", multiple=True, help="Web origin that may call us."),
    click.option("--allowed-host", multiple=True, help="Further name in the Host header."),
    click.option(
        "--max-body-bytes",
        default=8 << 20,
        show_default="8M",
        type=ByteSize(),
        help="Largest request and websocket message.",
    ),
    click.option(
        "--max-connections",
        default=1000,
        type=click.IntRange(1),
        help="Connections at a time; one more is told 503.",
    ),
    click.option(
        "--max-websockets",
        default=1024,
        type=click.IntRange(1),
        help="Websockets at a time, likewise.",
    ),
    click.option(
        "--websocket-idle-timeout",
        default=3600.0,
        type=PositiveNumber(),
        help="Seconds after which a websocket on which nothing runs is closed.",
    ),
    click.option(
        "--websocket-max-age",
        default=86_400.0,
        type=PositiveNumber(),
        help="Seconds after which one takes nothing new; it is closed once nothing runs.",
    ),
    click.option(
        "--header-timeout",
        default=15.0,
        type=PositiveNumber(),
        help="Seconds within which the head of a request must arrive, and a TLS handshake.",
    ),
    click.option(
        "--body-timeout",
        default=30.0,
        type=PositiveNumber(),
        help="Seconds within which its body must arrive.",
    ),
    click.option(
        "--send-timeout",
        default=30.0,
        type=PositiveNumber(),
        help="Seconds after which a client that takes nothing is cut off.",
    ),
    click.option(
        "--resume-ttl",
        default=30.0,
        type=PositiveNumber(),
        help="Seconds for which a resumable stream waits after its connection was lost.",
    ),
    click.option(
        "--resume-memory-bytes",
        default=64 << 20,
        show_default="64M",
        type=ByteSize(),
        help="Output kept of all streams to send it again after that.",
    ),
    click.option(
        "--keepalive-timeout",
        default=75.0,
        type=PositiveNumber(),
        help="Seconds that a connection without requests stays open; more than the proxy's.",
    ),
    click.option(
        "--log-level",
        default="info",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="What is logged; debug has a line for each HTTP request.",
    ),
    click.option(
        "--log-format",
        default="text",
        type=click.Choice(LOG_FORMATS),
        help="Of the log: for people, or one JSON object a line.",
    ),
)
