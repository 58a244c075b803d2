"""What these scripts share, in the clients' environments: only the standard library."""

import importlib.metadata
import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path

REAL_MODEL = "smollm2-135m"


def refused(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """Return the exception of this kind that the call ends with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} came")


class Checks:
    """Named checks of one client against one server.

    Attributes:
        url: of the server, without a trailing slash.
        model: what it serves.
    """

    def __init__(self, *packages: str) -> None:
        self.url, self.model = sys.argv[1:3]
        self._packages = packages
        self._checks: list[tuple[str, Callable[[], object], str | None]] = []
        with urllib.request.urlopen(f"{self.url}/openapi.json") as answer:
            self._document = json.load(answer)

    def is_answer(self, text: str | None) -> bool:
        """Whether the text answers what the capital of France is.

        A model with random weights can only be asked to say anything at all.
        """
        return "Paris" in (text or "") if self.model == REAL_MODEL else bool(text)

    def add(self, *, needs: str | None = None) -> Callable[[Callable[[], object]], None]:
        """Add a check; its docstring names it, and `needs` is a path or a field of ChatBody."""

        def decorate(function: Callable[[], object]) -> None:
            self._checks.append((function.__doc__ or function.__name__, function, needs))

        return decorate

    def run(self) -> None:
        """Run all; print what came out as JSON, and end with 1 if anything failed."""
        results = []
        for name, function, needs in self._checks:
            if needs is not None and not self._has(needs):
                results.append({"check": name, "outcome": "skipped", "why": f"no {needs}"})
                continue
            start_s = time.monotonic()
            try:
                function()
                result = {"check": name, "outcome": "passed"}
            except Exception:
                result = {
                    "check": name,
                    "outcome": "failed",
                    "why": _shortened(traceback.format_exc()),
                }
            results.append({**result, "seconds": round(time.monotonic() - start_s, 2)})
        versions = {name: importlib.metadata.version(name) for name in self._packages}
        sys.stdout.write(json.dumps({"versions": versions, "checks": results}) + "\n")
        sys.exit(any(result["outcome"] == "failed" for result in results))

    def _has(self, needs: str) -> bool:
        if needs.startswith("/"):
            return needs in self._document["paths"]
        return needs in self._document["components"]["schemas"]["ChatBody"]["properties"]


def _shortened(text: str) -> str:
    """The last lines, without the paths of this machine."""
    here = str(Path(__file__).parent)
    return text.replace(here, "").replace(sys.prefix, "")[-1500:]
