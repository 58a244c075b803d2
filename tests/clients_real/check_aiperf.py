"""`aiperf`: a run to the end, without a failed request.

Its tokenizer is the byte-level one of our tiny checkpoints, because it cannot read GGUF files and
the hub may be out of reach: its token counts are bytes, the server's are its own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks

checks = Checks("aiperf")
TOKENIZER = Path(__file__).parents[1] / "golden" / "tiny" / "llama"
NUM_REQUESTS = 16


def profile(endpoint_type):
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(Path(sys.executable).parent / "aiperf"), "profile"),
            *("--model", checks.model, "--url", checks.url, "--endpoint-type", endpoint_type),
            *("--streaming", "--tokenizer", str(TOKENIZER), "--concurrency", "4"),
            *("--request-count", str(NUM_REQUESTS), "--synthetic-input-tokens-mean", "64"),
            *("--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true"),
            *("--output-artifact-dir", folder, "--ui", "none"),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        [exported] = Path(folder).rglob("profile_export_aiperf.json")
        found = json.loads(exported.read_text(encoding="utf-8"))
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert not found.get("error_summary"), found["error_summary"]
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0


@checks.add()
def chat():
    """Sixteen streamed chats, four at a time"""
    profile("chat")


@checks.add()
def completions():
    """Sixteen streamed completions, four at a time"""
    profile("completions")


checks.run()
