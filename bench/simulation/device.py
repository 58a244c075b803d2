"""How long a step takes: the roofline of an accelerator, without any accelerator.

A step reads the weights and the K and V of all that it attends to, and multiplies. The slower of
the two sets its time, on top of it come the all-reduces of tensor parallelism and a fixed overhead:

    step = max(bytes / bandwidth, operations / rate) + all-reduces + overhead

Peaks are the vendor's. What a good implementation reaches of them (`Accelerator.*_efficiency`,
the link's latency, the overhead) are assumptions, the same for all models, and no measurement of
headrace: so the figures compare policies and sizes of a fleet, they do not promise a speed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

__all__ = [
    "H200",
    "MODELS",
    "DeviceModel",
    "FixedDevice",
    "RooflineDevice",
    "StepLoad",
]

BYTES_PER_VALUE = 2  # bfloat16, for weights, activations and KV alike


class StepLoad(NamedTuple):
    """What a step asks of the device.

    Attributes:
        num_slots: token slots that are computed: the bucket, padding included.
        decode_only: whether the bucket is one of those for decode-only steps.
        num_seqs: requests in it; each costs a row of logits.
        decode_context: sum over decode tokens of the tokens that each attends to.
        prefill_context: the same over prompt tokens.
    """

    num_slots: int
    decode_only: bool
    num_seqs: int
    decode_context: int
    prefill_context: int


class DeviceModel(Protocol):
    """Something that takes time for a step."""

    @property
    def name(self) -> str: ...

    def step_s(self, load: StepLoad) -> float:
        """Seconds that a step takes, given that the step before it is done."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedDevice:
    """A device of which a clock can be kept by hand: every step takes the same time."""

    seconds: float = 1.0
    name: str = "fixed"

    def step_s(self, load: StepLoad) -> float:
        return self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder, as in its `config.json`."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    ties_embeddings: bool

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers: the projections of attention and the gated MLP, no norms."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """Parameters of the projection to the vocabulary."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them; an embedding that is not tied is another matrix."""
        return self.layer_parameters + self.head_parameters * (1 if self.ties_embeddings else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_VALUE


QWEN3_0_6B = ModelShape(
    name="Qwen3-0.6B",
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    ties_embeddings=True,
)
LLAMA_3_8B = ModelShape(
    name="Llama-3-8B",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    ties_embeddings=False,
)
LLAMA_3_70B = replace(
    LLAMA_3_8B,
    name="Llama-3-70B",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    intermediate_size=28672,
)
MODELS: Mapping[str, ModelShape] = {"0.6b": QWEN3_0_6B, "8b": LLAMA_3_8B, "70b": LLAMA_3_70B}


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One chip and its links.

    Attributes:
        memory_bytes, bandwidth, flops: peaks: bytes, bytes/s, bfloat16 operations/s (dense).
        link_bandwidth: bytes/s to the other chips of a node, in one direction.
        link_latency_s: of one all-reduce, however small.
        bandwidth_efficiency, flops_efficiency, link_efficiency: shares of the peaks that are
            reached.
        overhead_s: of a step, whatever is in it: launches, sampling, the way to the host.
        memory_share: of the memory, for weights and KV together.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    link_latency_s: float
    bandwidth_efficiency: float
    flops_efficiency: float
    link_efficiency: float
    overhead_s: float
    memory_share: float


# Peaks: NVIDIA's data sheet of the H200 SXM (141 GB, 4.8 TB/s, 989 TFLOP/s dense, NVLink 900 GB/s
# both ways together). The rest is assumed.
H200 = Accelerator(
    name="H200",
    memory_bytes=141e9,
    bandwidth=4.8e12,
    flops=989e12,
    link_bandwidth=450e9,
    link_latency_s=10e-6,
    bandwidth_efficiency=0.8,
    flops_efficiency=0.6,
    link_efficiency=0.7,
    overhead_s=0.5e-3,
    memory_share=0.9,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineDevice:
    """A model on `num_chips` chips by tensor parallelism."""

    model: ModelShape
    accelerator: Accelerator = H200
    num_chips: int = 1

    def __post_init__(self) -> None:
        if self.num_chips not in (1, 2, 4, 8):
            raise ValueError(f"{self.num_chips=} must be 1, 2, 4 or 8")
        if self.kv_capacity_tokens < 1:
            raise ValueError(
                f"{self.model.name} ({self.model.num_parameters * BYTES_PER_VALUE / 1e9:.0f} GB) "
                f"leaves no room for KV on {self.num_chips} {self.accelerator.name}"
            )

    @property
    def name(self) -> str:
        return f"{self.model.name} on {self.num_chips} {self.accelerator.name}"

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose K and V fit beside the weights."""
        memory = self.num_chips * self.accelerator.memory_bytes * self.accelerator.memory_share
        weights = self.model.num_parameters * BYTES_PER_VALUE
        return max(0, math.floor((memory - weights) / self.model.kv_bytes_per_token))

    def step_s(self, load: StepLoad) -> float:
        chip = self.accelerator
        memory_s = self.num_bytes(load) / (
            self.num_chips * chip.bandwidth * chip.bandwidth_efficiency
        )
        compute_s = self.num_operations(load) / (
            self.num_chips * chip.flops * chip.flops_efficiency
        )
        return max(memory_s, compute_s) + self.all_reduce_s(load.num_slots) + chip.overhead_s

    def num_bytes(self, load: StepLoad) -> float:
        """Bytes read: weights, and the KV of decodes. Prompts read theirs once for many tokens."""
        weights = self.model.layer_parameters + self.model.head_parameters
        return weights * BYTES_PER_VALUE + load.decode_context * self.model.kv_bytes_per_token

    def num_operations(self, load: StepLoad) -> float:
        """Multiplications and additions of the projections and of attention."""
        model = self.model
        projections = model.layer_parameters * load.num_slots
        projections += model.head_parameters * load.num_seqs
        # Scores and weighted sum: each once over all heads for every token attended to.
        context = load.decode_context + load.prefill_context
        attention = 2 * model.num_layers * model.num_heads * model.head_dim * context
        return 2.0 * (projections + attention)

    def all_reduce_s(self, num_slots: int) -> float:
        """Two ring all-reduces of the activations in each layer."""
        if self.num_chips == 1:
            return 0.0
        chip = self.accelerator
        activations = num_slots * self.model.hidden_size * BYTES_PER_VALUE
        travelled = 2 * (self.num_chips - 1) / self.num_chips * activations
        once_s = travelled / (chip.link_bandwidth * chip.link_efficiency) + chip.link_latency_s
        return 2 * self.model.num_layers * once_s
