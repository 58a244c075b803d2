"""Make reference.json: the scores of these tasks by Hugging Face's implementation, in float32.

Run as ``python make_reference.py PATH_TO_GGUF`` in this folder, in the environment of
tests/golden/README.md with ``lm-eval==0.4.13`` beside it. It never imports headrace.
"""

import json
import sys
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = ["headrace_facts", "headrace_sentences"]


def main(path: Path) -> None:
    """Score the tasks and write every number and every sample's loglikelihoods."""
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(**source), batch_size=1)
    folder = Path(__file__).parent
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(lm, tasks=TASKS, task_manager=manager, bootstrap_iters=0)
    scores = {
        task: {name: value for name, value in found["results"][task].items() if "," in name}
        for task in TASKS
    }
    responses = {
        task: [sample["filtered_resps"] for sample in found["samples"][task]] for task in TASKS
    }
    reference = {"model": path.name, "scores": scores, "responses": responses}
    text = json.dumps(reference, indent=1) + "\n"
    (folder / "reference.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
