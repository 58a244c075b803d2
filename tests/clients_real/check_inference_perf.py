"""`inference-perf`: a run to the end with the server type vllm, without a failed request.

Its tokenizer is the byte-level one of our tiny checkpoints, as in check_aiperf.py.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks

checks = Checks("inference-perf")
TOKENIZER = Path(__file__).parents[1] / "golden" / "tiny" / "llama"

CONFIG = """
load: {{type: constant, stages: [{{rate: 1, duration: 12}}], num_workers: 1}}
api: {{type: completion, streaming: true}}
server: {{type: vllm, model_name: {model}, base_url: {url}, ignore_eos: true}}
tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}
data:
  type: random
  input_distribution: {{min: 16, max: 64, mean: 32, std_dev: 8, total_count: 12}}
  output_distribution: {{min: 8, max: 16, mean: 12, std_dev: 2, total_count: 12}}
storage: {{local_storage: {{path: {folder}/reports}}}}
"""


def run():
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        text = CONFIG.format(model=checks.model, url=checks.url, tokenizer=TOKENIZER, folder=folder)
        config.write_text(text, encoding="utf-8")
        command = [str(Path(sys.executable).parent / "inference-perf"), "--config_file", config]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        [summary] = Path(folder, "reports").rglob("summary_lifecycle_metrics.json")
        found = json.loads(summary.read_text(encoding="utf-8"))
    assert found["failures"]["count"] == 0, found["failures"]
    # At most one a second, and those that are not due before the end are never sent.
    assert found["successes"]["count"] == found["load_summary"]["count"] > 0


@checks.add()
def completion():
    """Streamed completions at a constant rate"""
    run()


checks.run()
