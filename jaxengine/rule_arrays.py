"""What rules about tokens look like on the device: arrays that most steps do not send.

A step in which nobody has rules gets arrays of zeros that live on the device and that it does not
look at. So rules cost nothing to those who have none.

Letters: S sequences, W words of 32 tokens, B biases, L positions of a sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from jaxengine.sampling_params import MAX_LOGIT_BIAS
from jaxengine.token_rules import TokenRules

__all__ = ["RuleArrays", "RuleLayout"]


class RuleArrays(NamedTuple):
    """Rules of the sequences of a step. A pytree of device arrays.

    Attributes:
        masks: a bit for each token that may be sampled, from the lowest on.
        biases: token ids (-1 where unused), and the bits of the floats to add to their logits.
        histories: ids so far as in TokenRules; -1 where unused.
    """

    masks: Int[Array, "S W"]
    biases: Int[Array, "S 2 B"]
    histories: Int[Array, "S L"]


@dataclass(frozen=True)
class RuleLayout:
    """Sizes of the arrays for a number of sequences."""

    num_seqs: int
    vocab_size: int
    max_model_len: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array, by its name in RuleArrays."""
        return {
            "masks": (self.num_seqs, -(-self.vocab_size // 32)),
            "biases": (self.num_seqs, 2, MAX_LOGIT_BIAS),
            "histories": (self.num_seqs, self.max_model_len),
        }

    def resident(self) -> RuleArrays:
        """Return the arrays of a step without rules, on the device."""
        return RuleArrays(
            **{
                name: jax.device_put(np.zeros(shape, np.int32))
                for name, shape in self.shapes().items()
            }
        )

    def pack(
        self, rules: Iterable[tuple[int, TokenRules, int]], resident: RuleArrays
    ) -> RuleArrays:
        """Return the arrays of a step; those that nobody needs stay the resident ones.

        Args:
            rules: sequences in the batch that have rules, these, and the number of tokens of
                the answer before the one to sample.
            resident: what `resident` returned.
        """
        packed: dict[str, NDArray[np.int32]] = {}
        shapes = self.shapes()

        def row(name: str, seq: int) -> NDArray[np.int32]:
            if name not in packed:
                packed[name] = np.full(shapes[name], -1, np.int32)
            found: NDArray[np.int32] = packed[name][seq]
            return found

        for seq, rule, num_before in rules:
            params = rule.params
            if params.masks:
                masks = row("masks", seq)
                masks[:] = np.frombuffer(rule.mask(masks.nbytes, num_before=num_before), np.int32)
            if params.logit_bias:
                ids, values = row("biases", seq)
                for place, (token_id, bias) in enumerate(params.logit_bias):
                    ids[place] = token_id
                    values[place : place + 1].view(np.float32)[0] = bias
            if rule.history:
                row("histories", seq)[: len(rule.history)] = np.frombuffer(rule.history, np.int32)
        return RuleArrays(*(packed.get(name, getattr(resident, name)) for name in shapes))
