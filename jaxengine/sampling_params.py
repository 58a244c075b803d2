"""How the next token of one request is chosen, and when the request ends."""

from dataclasses import dataclass

from jaxengine.errors import InvalidRequestError

__all__ = ["MAX_STOP_TOKEN_IDS", "SamplingParams"]

# The device masks these ids while `min_tokens` is not reached, in an array of fixed width.
MAX_STOP_TOKEN_IDS = 16

# Below this, logits divided by the temperature leave the range where noise means anything.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stopping rules of one request.

    Attributes:
        max_tokens: most tokens to generate; at least 1.
        min_tokens: EOS and stop ids are masked until this many tokens are generated.
        temperature: 0, or anything below 1e-5, means greedy (the first largest logit).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        seed: sampling noise depends on (seed, position) only; None draws a fresh seed.
        stop_token_ids: ids that end the request, besides the model's EOS ids.
        ignore_eos: EOS ids neither end the request nor are masked.

    Raises:
        InvalidRequestError: a value is out of range or not finite; `field` names it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # What must hold is compared, not what must not, so that NaN is refused as well.
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"must be between 0 and max_tokens ({self.max_tokens})",
        )
        _require(
            0 <= self.temperature <= 100, "temperature", self.temperature, "must be in [0, 100]"
        )
        _require(
            0 <= self.top_k < 2**31, "top_k", self.top_k, "must be between 0 (off) and 2147483647"
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]")
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**64, "seed", self.seed, "must be a 64-bit integer")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            len(self.stop_token_ids),
            f"may hold at most {MAX_STOP_TOKEN_IDS} ids",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def _require(ok: bool, field: str, value: float, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{field} {rule}, got {value}", field=field)
