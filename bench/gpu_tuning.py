"""From measured kernels to the order of the tuning table, as text for kernels_pallas/tuning.py."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

__all__ = ["rank_configs"]

RANKED_DTYPE = "bfloat16"


def rank_configs(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Order the entries of each key of the tuning table by speed.

    On every batch a configuration is compared with the fastest there; the mean of these ratios
    counts, so that long batches do not outvote short ones.

    Args:
        rows: of `measure_kernels`; those with an "error" have no time.

    Yields:
        For each kernel, phase and head dim: configurations, fastest first, with how many times as
        long as the fastest they took, and the entry of the table. Those that failed or were not
        measured on all batches come last, with None.
    """
    keys: dict[tuple[str, str, int], dict[tuple[int, int], dict[str, float | None]]] = {}
    for row in rows:
        if row["kv_cache_dtype"] == RANKED_DTYPE:
            batches = keys.setdefault((row["kernel"], row["phase"], row["head_dim"]), {})
            times = batches.setdefault((row["sequences"], row["context"]), {})
            times[row["config"]] = row.get("microseconds")
    for (kernel, phase, head_dim), batches in keys.items():
        ranked = _rank(list(batches.values()))
        lines = [
            f"        {config},  # {'not measured' if ratio is None else f'{ratio:.2f}'}"
            for config, ratio in ranked
        ]
        yield {
            "kernel": kernel,
            "phase": phase,
            "head_dim": head_dim,
            "ranked": [{"config": config, "ratio": ratio} for config, ratio in ranked],
            "entry": "\n".join([f'    ("{phase}", {head_dim}): (', *lines, "    ),"]),
        }


def _rank(batches: Sequence[Mapping[str, float | None]]) -> list[tuple[str, float | None]]:
    """Order configurations by the mean of their times, each over the shortest of its batch."""
    ratios: dict[str, list[float]] = {}
    for times in batches:
        fastest = min((time for time in times.values() if time is not None), default=None)
        for config, time in times.items():
            found = ratios.setdefault(config, [])
            if time is not None and fastest is not None:
                found.append(time / fastest)
    means = [
        (config, geometric_mean(found) if len(found) == len(batches) else None)
        for config, found in ratios.items()
    ]
    return sorted(means, key=lambda entry: (entry[1] is None, entry[1] or 0.0))
