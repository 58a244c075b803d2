"""Which replica gets a request.

A router sees the outstanding work of each replica, in tokens: prompts plus the mean output, since
it cannot know how long an answer will be. Prefix-affine routing is consistent hashing with bounded
loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018): a key goes to the first replica after its
place on a ring that is not loaded beyond a multiple of the mean.
"""

import bisect
import hashlib
import math
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ROUTERS",
    "DecayingLoads",
    "LeastLoaded",
    "PrefixAffine",
    "RoundRobin",
    "RouterName",
    "make_router",
]

RouterName = Literal["round-robin", "least-loaded", "prefix-affine"]
ROUTERS: tuple[RouterName, ...] = get_args(RouterName)

POINTS_PER_REPLICA = 64  # on the ring; more spread the keys more evenly
LOAD_BOUND = 1.25  # times the mean load, beyond which a replica is passed over

type Loads = NDArray[np.float64]


class Router(Protocol):
    """A way to choose."""

    def choose(self, key: int, cost: float, loads: Loads) -> int:
        """Return the replica for a request.

        Args:
            key: requests with the same key share a beginning.
            cost: its tokens.
            loads: outstanding tokens of each replica.
        """
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._count = 0

    def choose(self, key: int, cost: float, loads: Loads) -> int:
        replica = self._count % len(loads)
        self._count += 1
        return replica


class LeastLoaded:
    """The one with the fewest outstanding tokens; of equal ones, the first."""

    def choose(self, key: int, cost: float, loads: Loads) -> int:
        return int(loads.argmin())


class PrefixAffine:
    """The same key goes to the same replica, unless that has too much to do."""

    def __init__(self, num_replicas: int, *, load_bound: float = LOAD_BOUND) -> None:
        points = sorted(
            (ring_place(f"replica {replica}/{point}"), replica)
            for replica in range(num_replicas)
            for point in range(POINTS_PER_REPLICA)
        )
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]
        self._load_bound = load_bound

    def choose(self, key: int, cost: float, loads: Loads) -> int:
        # Whatever the mean, an idle replica may take a request.
        most = self._load_bound * (float(loads.sum()) + cost) / len(loads) + cost
        first = bisect.bisect(self._places, ring_place(f"key {key}"))
        for step in range(len(self._places)):
            replica = self._replicas[(first + step) % len(self._places)]
            if loads[replica] + cost <= most:
                return replica
        raise AssertionError("not all replicas can be loaded beyond the mean")


def ring_place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def make_router(name: RouterName, num_replicas: int) -> Router:
    """Return a router that has not routed anything."""
    if name == "round-robin":
        return RoundRobin()
    if name == "least-loaded":
        return LeastLoaded()
    return PrefixAffine(num_replicas)


class DecayingLoads:
    """A guess at the outstanding work, by a router that hears of no completion.

    What was sent to a replica is taken to drain exponentially, with the time that a request is
    expected to stay. That is right on average while replicas keep up, and too low once they do not.
    """

    def __init__(self, num_replicas: int, residence_s: float) -> None:
        self.values: Loads = np.zeros(num_replicas)
        self._residence_s = residence_s
        self._now_s = 0.0

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        self.values *= math.exp((self._now_s - now_s) / self._residence_s)
        self._now_s = now_s

    def add(self, replica: int, cost: float) -> None:
        """Note what was sent."""
        self.values[replica] += cost
