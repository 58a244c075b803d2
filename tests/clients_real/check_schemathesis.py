"""`schemathesis` on /openapi.json: whatever is sent, no 5xx, and answers as the document says."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks

checks = Checks("schemathesis", "hypothesis")

# Not positive_data_acceptance: a schema cannot say that a prompt fits the context, that a model is
# served or that a deadline is not in the past.
CONFORMANCE = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance"
)
EXAMPLES = "40"


def run(*arguments):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).parent / "schemathesis"), "run"),
                *(f"{checks.url}/openapi.json", "--max-examples", EXAMPLES, "--seed", "1"),
                *("--request-timeout", "300", "--suppress-health-check", "all", "--no-color"),
                *arguments,
            ],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"[1-9]\d* (generated|test cases)", done.stdout), done.stdout[-3000:]


@checks.add()
def positive():
    """Requests as the document describes them"""
    run("--checks", CONFORMANCE, "--mode", "positive", "--phases", "examples,coverage,fuzzing")


@checks.add()
def negative():
    """Requests as it forbids them"""
    run("--checks", CONFORMANCE, "--mode", "negative", "--phases", "coverage,fuzzing")


checks.run()
