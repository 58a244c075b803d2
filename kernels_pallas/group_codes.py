"""Weights in codes of four or eight bits, as files have them, packed for products of few tokens.

Inputs are in groups of 32. A group has a scale and a minimum for each output, and its weights are
bfloat16(scale * code + minimum). The products of `projection` multiply these numbers; where they
find the codes beside the numbers, those of few tokens read the codes instead, which is a quarter or
half of the memory. The bits are the same.

`native_source/coded_weights.h` says in which order packed codes lie. They have an axis for layers
in front.

Letters: O outputs, I inputs, G groups, L layers.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["GROUP", "CodeBits", "GroupCodes", "pack_codes", "packed_codes_shape"]

CodeBits = Literal[4, 8]

# Inputs of a group.
GROUP = 32

# Outputs side by side, as those of packed weights, and the bytes of a line.
COLUMN, LINE_BYTES = 16, 64

# Lines of a group of sixteen outputs: its codes, and the scales and minima.
LINES = {4: 4 + 1, 8: 8 + 1}


class GroupCodes(NamedTuple):
    """The weights of a product.

    Attributes:
        codes: [O, I]; uint8 from 0 to 15, or int8.
        scales: [O, G].
        minima: [O, G].
    """

    codes: NDArray[np.uint8 | np.int8]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16]

    def numbers(self) -> NDArray[np.float32]:
        """The weights, [O, I], before they are rounded to bfloat16."""
        scales, minima = (np.repeat(x.astype(np.float32), GROUP, axis=1) for x in self[1:])
        numbers: NDArray[np.float32] = scales * self.codes + minima
        return numbers


def packed_codes_shape(
    num_outputs: int, num_inputs: int, *, bits: CodeBits, num_layers: int = 1
) -> tuple[int, ...]:
    """Return the shape of packed codes, of dtype uint8, for weights that can be packed."""
    return num_layers, num_outputs // COLUMN, num_inputs // GROUP, LINES[bits], LINE_BYTES


def pack_codes(weights: GroupCodes, packed: NDArray[np.uint8]) -> None:
    """Put codes, scales and minima in the order that products want.

    Args:
        weights: of as many outputs and inputs as there is room for.
        packed: where they go, the part of one layer in packed codes.
    """
    columns, groups, lines, _ = packed.shape
    halves = weights.codes.view(np.uint8).reshape(columns, 2, COLUMN // 2, groups, GROUP)
    if lines == LINES[4]:
        both = halves[:, 0] | halves[:, 1] << np.uint8(4)
        # Line, output, input of a pair, pair.
        pieces = both.reshape(columns, COLUMN // 2, groups, 4, 4, 2).transpose(0, 2, 3, 1, 5, 4)
    else:
        # Pair, half, output, input of a pair.
        pieces = halves.reshape(columns, 2, COLUMN // 2, groups, GROUP // 2, 2).transpose(
            0, 3, 4, 1, 2, 5
        )
    packed[:, :, :-1] = pieces.reshape(columns, groups, lines - 1, LINE_BYTES)
    last = packed[:, :, -1].view(np.float16)
    for part, numbers in enumerate((weights.scales, weights.minima)):
        place = last[..., part * COLUMN : (part + 1) * COLUMN]
        place[...] = numbers.reshape(columns, COLUMN, groups).swapaxes(1, 2)
