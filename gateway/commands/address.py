"""The address of a server: found out early to be taken, and told to others in a file."""

import ipaddress
import os
import socket
import tempfile
from pathlib import Path

import click

__all__ = ["check_address", "check_loopback", "prepare_port_file", "reason", "write_port_file"]


def check_address(host: str, port: int) -> None:
    """Bind once and let go: a taken port is said at once, not after minutes of loading.

    Raises:
        click.ClickException: the address cannot be had.
    """
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in addresses:
            if family is socket.AF_INET6 and not socket.has_ipv6:
                continue
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family is socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {reason(error)}") from error


def check_loopback(host: str) -> None:
    """Refuse an address that others can reach, for a server that lets everybody in.

    Raises:
        click.UsageError: it is one.
    """
    addresses = socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)
    if all(ipaddress.ip_address(address[4][0]).is_loopback for address in addresses):
        return
    raise click.UsageError(
        f"others can reach {host or 'this address'}, and without API keys everybody could use the "
        "model: give --api-keys-file (headrace keys new), or --allow-unauthenticated"
    )


def prepare_port_file(path: Path) -> None:
    """Remove what an earlier server left, so that nobody takes its port for the new one.

    Raises:
        click.ClickException: nothing can be written there.
    """
    try:
        if path.is_file():
            path.unlink()
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise click.ClickException(f"cannot write --port-file {path}: {reason(error)}") from error


def write_port_file(path: Path, port: int) -> None:
    """Write the file so that a reader sees all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(str(port))
    os.replace(temporary, path)


def reason(error: OSError) -> str:
    """What happened, without the path or address that the caller names itself."""
    if error.errno is None or error.errno <= 0:  # a name that cannot be looked up
        return error.strerror or str(error)
    return os.strerror(error.errno)
