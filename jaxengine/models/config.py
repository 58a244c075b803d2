"""The shape of a decoder, read from a Hugging Face config: one table, not a file per family."""

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


# model_type of config.json (or the architecture of a GGUF file) -> options.
FAMILIES: Mapping[str, FamilyOptions] = {
    "llama": FamilyOptions(),  # Llama 2 and 3, SmolLM2
    "mistral": FamilyOptions(),
    "qwen2": FamilyOptions(qkv_bias=True),
    "qwen3": FamilyOptions(qk_norm=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and options of a decoder. Hashable, so it can key a compiled program.

    Attributes:
        num_heads, num_kv_heads, head_dim: N, K and H of the array letters.
        max_position_embeddings: context length that the model was trained for, in tokens.
        tie_embeddings: the output projection is the embedding table.
        qkv_bias: q, k and v projections have a bias (Qwen2).
        qk_norm: q and k heads pass through an RMS norm before RoPE (Qwen3).
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
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"model config: head_dim={self.head_dim} must be even")

    @property
    def vocab_rows(self) -> int:
        """Tokens that a shard has the weights of: its part, or all where they do not divide."""
        whole, rest = divmod(self.vocab_size, self.num_shards)
        return self.vocab_size if rest else whole

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
        if hf.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {hf['hidden_act']!r} is not supported, only 'silu'")
        if hf.get("mlp_bias"):
            raise ModelError("mlp_bias is not supported")
        max_positions = _get(hf, "max_position_embeddings", int)
        window = hf.get("sliding_window")
        uses_window = family == "mistral" or hf.get("use_sliding_window", False)
        if window is not None and uses_window and int(window) < max_positions:
            # Within the window, full attention is the same thing: serve that much context.
            max_positions = int(window)
        num_heads = _get(hf, "num_attention_heads", int)
        hidden_size = _get(hf, "hidden_size", int)
        # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling.
        rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
        eos = hf.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=_get(hf, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_get(hf, "intermediate_size", int),
            num_layers=_get(hf, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
            head_dim=int(hf.get("head_dim") or hidden_size // max(num_heads, 1)),
            max_position_embeddings=max_positions,
            rms_norm_eps=_get(hf, "rms_norm_eps", float),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=options.qkv_bias or bool(hf.get("attention_bias", False)),
            qk_norm=options.qk_norm,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


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
