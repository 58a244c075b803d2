"""What the kernel alone takes to send: the floor under every server's cost per token.

    python -m bench.bare_send PORT CONNECTIONS

reads so many connections until they end, in a process of its own.
"""

import select
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

__all__ = ["measure_bare_send"]


def measure_bare_send(
    num_connections: int, num_bytes: int, *, num_rounds: int, interval_s: float
) -> float:
    """Return the microseconds of this thread for one `send`, a small one to every connection.

    Args:
        num_connections: on the loopback device, read by another process.
        num_bytes: of each send.
        num_rounds: how often each connection gets something.
        interval_s: between two rounds.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        port = str(listener.getsockname()[1])
        reader = subprocess.Popen([sys.executable, "-m", __name__, port, str(num_connections)])
        stack.callback(reader.wait)
        connections = []
        for _ in range(num_connections):
            connection = stack.enter_context(listener.accept()[0])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections.append(connection)
        data = bytes(num_bytes)
        used_s = 0.0
        for _ in range(num_rounds):
            time.sleep(interval_s)
            start_s = time.thread_time()
            for connection in connections:
                connection.send(data)
            used_s += time.thread_time() - start_s
        return used_s / (num_rounds * num_connections) * 1e6


def read_all(port: int, num_connections: int) -> None:
    """Read what comes on new connections until all have ended."""
    poll = select.epoll()
    connections = {}
    for _ in range(num_connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connections[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)
    while connections:
        for number, _ in poll.poll():
            if not connections[number].recv(65536):
                poll.unregister(number)
                connections.pop(number).close()


if __name__ == "__main__":
    read_all(int(sys.argv[1]), int(sys.argv[2]))
