"""Render the Helm chart, for tests on machines without Helm; run it after each change of the chart.

    python tests/golden/make_chart.py

It needs `helm` on PATH, or the package `helm-python-sdk`, which has Helm's library in it.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "headrace"
RENDERED = Path(__file__).parent / "chart"
NAME, NAMESPACE = "headrace", "llm"


def digest() -> str:
    """Of everything that the rendered files are made of."""
    found = hashlib.sha256()
    for path in sorted(filter(Path.is_file, CHART.rglob("*"))):
        found.update(path.relative_to(CHART).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def cases() -> dict[str, Path | None]:
    """Names of the rendered files, and the values that they are made with."""
    files = {path.name.removesuffix("-values.yaml"): path for path in CHART.glob("ci/*.yaml")}
    return {"default": None, **files}


def render(values: Path | None) -> Iterator[Any]:
    if shutil.which("helm"):
        more = [] if values is None else ["--values", str(values)]
        command = ["helm", "template", NAME, str(CHART), "--namespace", NAMESPACE, *more]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    else:
        import helm_python

        with helm_python.Chart.load(str(CHART)) as chart:
            given = {} if values is None else yaml.safe_load(values.read_text(encoding="utf-8"))
            files = chart.render(given, name=NAME, namespace=NAMESPACE)
        text = "\n---\n".join(files[name] for name in files if name.endswith(".yaml"))
    return (document for document in yaml.safe_load_all(text) if document)


def main() -> None:
    RENDERED.mkdir(exist_ok=True)
    for name, values in cases().items():
        documents = sorted(render(values), key=lambda d: (d["kind"], d["metadata"]["name"]))
        text = yaml.safe_dump_all(documents, sort_keys=True)
        path = RENDERED / f"{name}.yaml"
        path.write_text(f"# of chart {digest()}\n{text}", encoding="utf-8")
        sys.stderr.write(f"{path.name}: {len(documents)} objects\n")


if __name__ == "__main__":
    main()
