"""Make smollm2_logits.npz: float32 logits of the default model on one short prompt.

Run as ``python make_smollm2_logits.py PATH_TO_GGUF`` in the environment of make_golden.py.

    prompt     i32[T]      token ids
    top_ids    i32[T, 50]  the 50 likeliest next tokens at every position, likeliest first
    top_logits f32[T, 50]  their logits
    log_z      f32[T]      log of the sum of exp(logit) over the vocabulary
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The quick brown fox jumps over the lazy dog near 42 rivers"
NUM_TOP = 50


@torch.no_grad()
def main(path: Path) -> None:
    """Compute and save the logits."""
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    top = torch.topk(logits, NUM_TOP)
    np.savez_compressed(
        Path(__file__).parent / "smollm2_logits.npz",
        prompt=np.array(ids, np.int32),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        log_z=torch.logsumexp(logits, dim=-1).numpy(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
