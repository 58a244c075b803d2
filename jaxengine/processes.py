"""Several processes that run the same steps, usually one on each host.

Process 0 leads: it has the scheduler and the gateway. Before it launches a step it tells the others
which, through the key-value store of JAX's coordination service, to which every process is
connected anyway; they launch the same program with the same input. All that devices exchange are
the collectives of these programs, which are JAX's.

A process that ends takes the others with it: the coordination service notices, and ends them.
"""

import hashlib
import io
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax._src import distributed  # the store has no public name yet
from jax.experimental import multihost_utils
from numpy.typing import NDArray

__all__ = ["ProcessGroup", "ProcessOptions", "StepOrder"]

# How long the processes wait for each other at the start: the others may still be downloading.
JOIN_TIMEOUT_S = 300
ASK_INTERVAL_S = 0.5
HEARTBEAT_TIMEOUT_S = 30
# Who waits for another process asks again after so long.
POLL_TIMEOUT_MS = 10_000

# Orders lie in the store by the page. A page is deleted once every follower has said that it took
# all of it; before the leader begins a page it waits until the one before the last is gone.
PAGE_ORDERS = 64

STOP, RESET = -2, -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOptions:
    """Which process this is, and where they meet.

    Attributes:
        coordinator_address: host and port of process 0, where it listens for the others.
        num_processes: how many there are.
        process_id: from 0 up.
    """

    coordinator_address: str
    num_processes: int
    process_id: int

    def __post_init__(self) -> None:
        host, _, port = self.coordinator_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"coordinator_address must be HOST:PORT, got {self.coordinator_address!r}"
            )
        if self.num_processes < 2:
            raise ValueError(f"num_processes must be at least 2, got {self.num_processes}")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id must be from 0 to {self.num_processes - 1}, got {self.process_id}"
            )


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step to run, or an empty cache to begin with.

    Attributes:
        bucket: index of the compiled step; None for the empty cache.
        arrays: its input that is not on the devices yet, by name.
    """

    bucket: int | None
    arrays: Mapping[str, NDArray[np.int32]]

    def encode(self) -> bytes:
        buffer = io.BytesIO()
        kind = np.int32(RESET if self.bucket is None else self.bucket)
        np.savez(buffer, allow_pickle=False, kind=kind, **self.arrays)
        return buffer.getvalue()


class ProcessGroup:
    """This process among those that serve one model together.

    Joins them, so that JAX sees the devices of all; call it before JAX is asked for any. Where the
    others do not come, JAX ends the process, after a while and with much ado.

    Raises:
        ValueError: process 0 cannot listen, or is not found.
    """

    def __init__(self, options: ProcessOptions) -> None:
        self.num_processes = options.num_processes
        self.process_id = options.process_id
        self._num_orders = 0
        check = _check_free if self.leads else _wait_for_leader
        check(options.coordinator_address)
        jax.distributed.initialize(
            options.coordinator_address,
            options.num_processes,
            options.process_id,
            initialization_timeout=JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            # Not on every interface, which is the default: whoever connects takes part.
            coordinator_bind_address=options.coordinator_address,
        )
        store = distributed.global_state.client
        assert store is not None  # it is, once they have met
        self._store = store

    @property
    def leads(self) -> bool:
        return self.process_id == 0

    def least(self, size: int) -> int:
        """Return the smallest of a number of bytes that each process has, in whole MiB."""
        sizes = multihost_utils.process_allgather(np.int32(min(size >> 20, 2**31 - 1)))
        return int(np.min(sizes)) << 20

    def check_agreement(self, facts: str) -> None:
        """Make sure that all processes say the same.

        Raises:
            ValueError: they do not.
        """
        digest = np.frombuffer(hashlib.sha256(facts.encode()).digest(), np.int32)
        digests = multihost_utils.process_allgather(digest)
        differing = [i for i, other in enumerate(digests) if not np.array_equal(other, digests[0])]
        if differing:
            raise ValueError(
                f"num_processes {self.num_processes} were not started with the same model, options "
                f"and machines: process {differing[0]} has another configuration than process 0"
            )

    def tell(self, order: StepOrder) -> None:
        """Tell the others what to run; for the leader."""
        self._send(order.encode())

    def dismiss(self) -> None:
        """Tell the others to end; for the leader."""
        self._send(np.int32(STOP).tobytes())

    def orders(self) -> Iterator[StepOrder]:
        """Yield what the leader runs, until it dismisses us.

        Raises:
            RuntimeError: the leader is gone.
        """
        while True:
            content = self._receive()
            if content == np.int32(STOP).tobytes():
                return
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                kind = int(arrays["kind"])
                rest = {name: arrays[name] for name in arrays.files if name != "kind"}
            yield StepOrder(None if kind == RESET else kind, rest)

    def _send(self, content: bytes) -> None:
        page, place = divmod(self._num_orders, PAGE_ORDERS)
        if place == 0 and page >= 2:
            for follower in range(1, self.num_processes):
                self._wait_for(_taken_key(page - 2, follower))
            # The names of pages are folders to the store, which deletes all that is in one.
            self._store.key_value_delete(_page_key(page - 2))
        self._store.key_value_set_bytes(_order_key(page, place), content)
        self._num_orders += 1

    def _receive(self) -> bytes:
        page, place = divmod(self._num_orders, PAGE_ORDERS)
        content = self._wait_for(_order_key(page, place))
        self._num_orders += 1
        if place == PAGE_ORDERS - 1:
            self._store.key_value_set_bytes(_taken_key(page, self.process_id), b"")
        return content

    def _wait_for(self, key: str) -> bytes:
        while True:
            try:
                content: bytes = self._store.blocking_key_value_get_bytes(key, POLL_TIMEOUT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                continue  # not there yet
            return content


def _page_key(page: int) -> str:
    return f"headrace/orders/{page}"


def _order_key(page: int, place: int) -> str:
    return f"{_page_key(page)}/{place}"


def _taken_key(page: int, follower: int) -> str:
    return f"{_page_key(page)}/taken/{follower}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _check_free(address: str) -> None:
    """Raise unless this process can listen there: JAX would not say it in a sentence."""
    try:
        host, port = _split(address)
        family, *_, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(resolved)
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen on coordinator_address {address}: {error.strerror}"
        ) from error


def _wait_for_leader(address: str) -> None:
    """Wait until process 0 listens; JAX itself would end the process where it does not."""
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            socket.create_connection(_split(address), timeout=ASK_INTERVAL_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise ValueError(
                    f"process 0 did not listen on coordinator_address {address} within "
                    f"{JOIN_TIMEOUT_S} s: {error.strerror or error}"
                ) from error
        time.sleep(ASK_INTERVAL_S)
