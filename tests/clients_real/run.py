"""Run real clients, each in an environment of its own, against one server; see README.md."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import nullcontext
from pathlib import Path

from bench.environment import describe_environment
from bench.server_process import find_headrace, running_server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"

# Exactly these versions were run; what they need themselves is resolved anew.
PACKAGES = {
    "openai": ["openai[realtime]==3.57.0"],
    "litellm": ["litellm==1.110.2"],
    "langchain-openai": ["langchain-openai==1.7.4"],
    "llm": ["llm==0.36"],
    "schemathesis": ["schemathesis==4.32.5"],
    "lm-eval": ["lm-eval[api]==0.4.13"],
    "aiperf": ["aiperf==0.13.0"],
    "inference-perf": ["inference-perf==0.7.0"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--url", help="a server that runs; without it, one is started")
    parser.add_argument("--model", help="what the started server serves")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.clients) - PACKAGES.keys():
        parser.error(f"unknown: {', '.join(unknown)}")
    report = {"environment": describe_environment(["run.py", *sys.argv[1:]]), "clients": {}}
    if options.output_json is not None and options.output_json.exists():
        # Others of an earlier run stay.
        report["clients"] = json.loads(options.output_json.read_text(encoding="utf-8"))["clients"]
    with tempfile.TemporaryFile("w+") as output, _server(options, output) as server:
        url = options.url or server.url
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        for name in options.clients or PACKAGES:
            report["clients"][name] = {"model": model, **_run(name, url, model)}
            if options.output_json is not None:  # after each, so that what was run is not lost
                text = json.dumps(report, indent=1) + "\n"
                options.output_json.write_text(text, encoding="utf-8")
    ran = [report["clients"][name] for name in options.clients or PACKAGES]
    outcomes = [check["outcome"] for client in ran for check in client["checks"]]
    return int("failed" in outcomes or not outcomes)


def _server(options, output):
    if options.url is not None:
        return nullcontext()
    # Some requests that are made up ask for as much as the context holds.
    command = [find_headrace(), "serve", *([options.model] if options.model else [])]
    command += ["--max-model-len", "512", "--dtype", "float32"]
    return running_server(command, startup_timeout_s=600, output=output)


def _run(name, url, model):
    """Run one client's checks; tell them as they come out."""
    sys.stderr.write(f"== {name}\n")
    python = _environment(name)
    script = HERE / f"check_{name.replace('-', '_')}.py"
    done = subprocess.run(
        [python, script, url, model], stdout=subprocess.PIPE, text=True, check=False
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
    if not done.exists() or done.read_text(encoding="utf-8") != " ".join(PACKAGES[name]):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--only-binary", ":all:", *PACKAGES[name]], check=True)
        done.write_text(" ".join(PACKAGES[name]), encoding="utf-8")
    return python


if __name__ == "__main__":
    sys.exit(main())
