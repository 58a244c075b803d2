"""`lm-eval` with `local-completions`: scores equal to Hugging Face's on the same weights.

The server must serve the default model with ``--dtype float32``; others are not compared.
"""

import json
import math
import os
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
TASKS = Path(__file__).parent / "lm_eval_tasks"
os.chdir(TASKS)

from checks import Checks  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

checks = Checks("lm-eval")
reference = json.loads((TASKS / "reference.json").read_text(encoding="utf-8"))
LOGLIKELIHOOD_TOLERANCE = 2e-3  # of a whole text, in float32, summed in another order


def evaluate(task):
    """Score one task through the server, with the tokenizer of the server."""
    return simple_evaluate(
        "local-completions",
        model_args={
            "model": checks.model,
            "base_url": f"{checks.url}/v1/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": 4,
            "max_length": 511,
        },
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )


def compare(task):
    found = evaluate(task)
    for name, expected in reference["scores"][task].items():
        if isinstance(expected, float):
            score = found["results"][task][name]
            assert math.isclose(score, expected, rel_tol=1e-4), (name, score, expected)
    numbers = [sample["filtered_resps"] for sample in found["samples"][task]]
    differences = [
        abs(ours - theirs)
        for ours, theirs in zip(flat(numbers), flat(reference["responses"][task]), strict=True)
    ]
    assert max(differences) < LOGLIKELIHOOD_TOLERANCE, max(differences)


def flat(value):
    """Every number in nested lists; whether a choice is greedy counts as 0 or 1."""
    if isinstance(value, list | tuple):
        return [number for inner in value for number in flat(inner)]
    return [float(value)]


@checks.add()
def facts():
    """Multiple choice: accuracy, and each loglikelihood, as Hugging Face's"""
    compare("headrace_facts")


@checks.add()
def sentences():
    """Perplexity of whole texts, and each loglikelihood, as Hugging Face's"""
    compare("headrace_sentences")


checks.run()
