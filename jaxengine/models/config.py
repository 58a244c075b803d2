"""The shape of a decoder, read from a Hugging Face config: one table, not a file per family."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.errors import ModelError

__all__ = ["Llama3RopeScaling", "ModelConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1: long wavelengths are stretched by `factor`.

    Source: "rope_type": "llama3" of the Llama 3.1 release.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyOptions:
    """Where the families of the Llama line differ."""

    qkv_bias: bool = False
    qk_norm: bool = False
    is_gemma2: bool = False


# model_type of config.json (or the architecture of a GGUF file) -> options.
FAMILIES: Mapping[str, FamilyOptions] = {
    "llama": FamilyOptions(),  # Llama 2 and 3, SmolLM2
    "mistral": FamilyOptions(),
    "qwen2": FamilyOptions(qkv_bias=True),
    "qwen3": FamilyOptions(qk_norm=True),
    "gemma2": FamilyOptions(is_gemma2=True),
}


GEMMA2_SCALARS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and options of a decoder. Hashable, so it can key a compiled program.

    Attributes:
        num_heads, num_kv_heads, head_dim: N, K and H of the array letters.
        max_position_embeddings: context length that the model was trained for, in tokens.
        tie_embeddings: the output projection is the embedding table.
        qkv_bias: q, k and v projections have a bias (Qwen2).
        qk_norm: q and k heads pass through an RMS norm before RoPE (Qwen3).
        sliding_window: tokens that a token sees in the layers of `windowed_layers`, its own
            included; None where no layer has a window.
        windowed_layers: numbers of these layers, ascending.
        query_pre_attn_scalar: attention scores are divided by its square root; None for head_dim.
        attention_soft_cap, logit_soft_cap: attention scores and logits x become
            cap * tanh(x / cap).
        is_gemma2: embeddings are scaled by the square root of D, attention and MLP have a norm
            behind them as well, gates pass through GELU, and norms are stored less one.
        eos_token_ids: ids that end an answer.
        num_shards: devices that share the model. Where there are several, heads and
            `intermediate_size` are those of one shard (models.sharding); all else is the model's.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    query_pre_attn_scalar: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    is_gemma2: bool = False
    eos_token_ids: tuple[int, ...] = ()
    num_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if not 1 <= getattr(self, name) <= 1 << 24:
                raise ModelError(f"model config: {name}={getattr(self, name)} is out of range")
        if not 1 <= self.num_kv_heads <= self.num_heads or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} kv heads"
            )
        for name in ("query_pre_attn_scalar", "attention_soft_cap", "logit_soft_cap"):
            if not 0 < (getattr(self, name) or 1.0) < math.inf:
                raise ModelError(f"model config: {name}={getattr(self, name)} is out of range")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"model config: head_dim={self.head_dim} must be even")

    @property
    def vocab_rows(self) -> int:
        """Tokens that a shard has the weights of: its part, or all where they do not divide."""
        whole, rest = divmod(self.vocab_size, self.num_shards)
        return self.vocab_size if rest else whole

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where it sees everything."""
        windowed = frozenset(self.windowed_layers)
        return tuple(
            self.sliding_window if layer in windowed else None for layer in range(self.num_layers)
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Read a parsed config.json.

        Raises:
            ModelError: an unknown family, a missing key, or an option that is not supported.
        """
        family = str(hf.get("model_type"))
        options = FAMILIES.get(family)
        if options is None:
            raise ModelError(
                f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}"
            )
        activation_key = "hidden_activation" if options.is_gemma2 else "hidden_act"
        activation = "gelu_pytorch_tanh" if options.is_gemma2 else "silu"
        if (hf.get(activation_key) or activation) != activation:
            raise ModelError(
                f"{activation_key} {hf[activation_key]!r} is not supported, only {activation!r}"
            )
        for key in ("mlp_bias", "use_bidirectional_attention"):
            if hf.get(key):
                raise ModelError(f"{key} is not supported")
        num_layers = _get(hf, "num_hidden_layers", int)
        max_positions = _get(hf, "max_position_embeddings", int)
        window, windowed = _windows(hf, family, num_layers, max_positions)
        num_heads = _get(hf, "num_attention_heads", int)
        hidden_size = _get(hf, "hidden_size", int)
        scalar, attention_cap, logit_cap = (
            _get(hf, key, float) if options.is_gemma2 and hf.get(key) is not None else None
            for key in GEMMA2_SCALARS
        )
        # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling.
        rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
        eos = hf.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=_get(hf, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_get(hf, "intermediate_size", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
            head_dim=int(hf.get("head_dim") or hidden_size // max(num_heads, 1)),
            max_position_embeddings=max_positions,
            rms_norm_eps=_get(hf, "rms_norm_eps", float),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope),
            tie_embeddings=bool(hf.get("tie_word_embeddings", options.is_gemma2)),
            qkv_bias=options.qkv_bias or bool(hf.get("attention_bias", False)),
            qk_norm=options.qk_norm,
            sliding_window=window,
            windowed_layers=windowed,
            query_pre_attn_scalar=scalar,
            attention_soft_cap=attention_cap,
            logit_soft_cap=logit_cap,
            is_gemma2=options.is_gemma2,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def _windows(
    hf: Mapping[str, Any], family: str, num_layers: int, max_positions: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window, and the layers that have it.

    A list of `layer_types` says which; older configs leave it to the family: all of Mistral,
    every other one of Gemma 2 from the first on, and of Qwen those from `max_window_layers` on.
    """
    if family == "llama" or (family.startswith("qwen") and not hf.get("use_sliding_window")):
        return None, ()
    if hf.get("sliding_window") is None:
        return None, ()
    window = _get(hf, "sliding_window", int)
    if window < 1:
        raise ModelError(f"model config: sliding_window={window} must be at least 1")
    kinds = hf.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"sliding_attention", "full_attention"}
        if unknown or len(kinds) != num_layers:
            raise ModelError(f"layer_types {kinds!r:.80} is not supported")
        windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    elif family == "gemma2":
        windowed = list(range(0, num_layers, 2))
    else:
        # 28 is what transformers assumes.
        first = 0 if family == "mistral" else int(hf.get("max_window_layers", 28))
        windowed = list(range(first, num_layers))
    # A window that is never full is none.
    return (window, tuple(windowed)) if windowed and window < max_positions else (None, ())


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope scaling {kind!r} is not supported, only 'llama3'")
    return Llama3RopeScaling(
        factor=_get(rope, "factor", float),
        low_freq_factor=_get(rope, "low_freq_factor", float),
        high_freq_factor=_get(rope, "high_freq_factor", float),
        original_max_position_embeddings=_get(rope, "original_max_position_embeddings", int),
    )


def _get[T: (int, float)](hf: Mapping[str, Any], key: str, kind: type[T]) -> T:
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"model config: {key} is missing or not a number (got {value!r})")
    return kind(value)
