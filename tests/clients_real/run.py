"""Run real clients, each in an environment of its own, against one server; see README.md."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from bench.environment import describe_environment
from bench.server_process import find_headrace, running_server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"

PINS = ROOT / "requirements" / "clients"

# Small enough for every change: all that they need is pinned in requirements/clients.
LIGHT = ("openai", "langchain-openai", "llm")
# Exactly these versions were run; what they need themselves is resolved anew.
HEAVY = {
    "litellm": "litellm==1.110.2",
    "schemathesis": "schemathesis==4.32.5",
    "lm-eval": "lm-eval[api]==0.4.13",
    "aiperf": "aiperf==0.13.0",
    "inference-perf": "inference-perf==0.7.0",
}
CLIENTS = (*LIGHT, *HEAVY)
# A model of random weights that starts in seconds; the checks then only want any answer.
TINY = (
    *(str(ROOT / "tests" / "golden" / "tiny" / "llama"), "--served-model-name", "tiny"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--num-kv-blocks", "120"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--url", help="a server that runs; without it, one is started")
    parser.add_argument("--model", help="what the started server serves")
    parser.add_argument("--light", action="store_true", help=f"{', '.join(LIGHT)}; a tiny model")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    names = options.clients or (LIGHT if options.light else CLIENTS)
    if unknown := set(options.clients) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(unknown)}")
    report = {"environment": describe_environment(["run.py", *sys.argv[1:]]), "clients": {}}
    if options.output_json is not None and options.output_json.exists():
        # Others of an earlier run stay.
        report["clients"] = json.loads(options.output_json.read_text(encoding="utf-8"))["clients"]
    with tempfile.TemporaryFile("w+") as output, _server(options, output) as server:
        url = options.url or server.url
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        for name in names:
            report["clients"][name] = {"model": model, **_run(name, url, model)}
            if options.output_json is not None:  # after each, so that what was run is not lost
                text = json.dumps(report, indent=1) + "\n"
                options.output_json.write_text(text, encoding="utf-8")
    checks = [check for name in names for check in report["clients"][name]["checks"]]
    counts = Counter(check["outcome"] for check in checks)
    sys.stderr.flush()
    sys.stdout.write(f"clients: {counts['passed']} passed, {counts['failed']} failed\n")
    return int(counts["failed"] > 0 or counts["passed"] == 0)


def _server(options, output):
    if options.url is not None:
        return nullcontext()
    # Some requests that are made up ask for as much as the context holds.
    command = [find_headrace(), "serve", *([options.model] if options.model else [])]
    command += TINY if options.light else ["--max-model-len", "512", "--dtype", "float32"]
    return running_server(command, startup_timeout_s=600, output=output)


def _run(name, *arguments):
    """Run one client's checks; tell them as they come out."""
    sys.stderr.write(f"== {name}\n")
    python = _environment(name)
    script = HERE / f"check_{name.replace('-', '_')}.py"
    done = subprocess.run(
        [python, script, *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        why = f"it ended with {done.returncode} and no result"
        result = {"versions": {}, "checks": [{"check": name, "outcome": "failed", "why": why}]}
    for check in result["checks"]:
        sys.stderr.write(f"{check['outcome']:8} {check['check']}\n")
        if "why" in check:
            sys.stderr.write(f"         {check['why']}\n")
    return result


def _environment(name):
    """The Python of a client's environment, made at its first use."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if name in LIGHT:
        pins = PINS / f"{name}.txt"
        packages, wanted = ["--no-deps", "--require-hashes", "-r", pins], pins.read_text("utf-8")
        packages += ["--only-binary", ":all:"]
    else:  # some of what they need is published as source only
        packages, wanted = [HEAVY[name]], HEAVY[name]
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        # Our pip will do for all of them; to give each its own takes longer than most installs.
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        install += ["--disable-pip-version-check"]
        subprocess.run([*install, *packages], check=True)
        done.write_text(wanted, encoding="utf-8")
    return python


if __name__ == "__main__":
    sys.exit(main())
