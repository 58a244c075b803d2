"""How the next token of one request is chosen, and when the request ends."""

from dataclasses import dataclass
from typing import Protocol

from jaxengine.errors import InvalidRequestError

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_TOKEN_IDS",
    "Grammar",
    "Matcher",
    "SamplingParams",
]

# The device masks these ids while `min_tokens` is not reached, in an array of fixed width.
MAX_STOP_TOKEN_IDS = 16

# The device returns so many alternatives to a token, and takes so many biases, in arrays of fixed
# width.
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300

MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64

# Below this, logits divided by the temperature leave the range where noise means anything.
MIN_TEMPERATURE = 1e-5


class Matcher(Protocol):
    """Where one answer stands in its grammar. Only the engine thread touches it."""

    def mask(self) -> bytes:
        """Return the tokens that may come next: token i is bit i % 8 of byte i // 8."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token that the last mask allows, and that does not end the answer."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing may follow."""
        ...


class Grammar(Protocol):
    """What the text of an answer must look like, compiled for the model's tokens."""

    def new_matcher(self) -> Matcher:
        """Return a matcher at the beginning; each request has its own."""
        ...


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
        logprobs: alternatives to report with the log-probability of each sampled token; None
            reports nothing.
        prompt_logprobs: likewise for each prompt token but the first.
        presence_penalty: taken off the logits of tokens that were generated before.
        frequency_penalty: taken off the logits of a token for each time it was generated.
        repetition_penalty: logits of tokens in the prompt or generated are divided by this if
            positive, else multiplied.
        logit_bias: (token id, what is added to its logit).
        bad_words: sequences of ids that must not be generated.
        allowed_token_ids: the only ids that may be sampled; None allows all.
        grammar: what the answer must match.

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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None

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
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None:
                _require(0 <= wanted <= MAX_LOGPROBS, name, wanted, f"must be 0 to {MAX_LOGPROBS}")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(-2 <= penalty <= 2, name, penalty, "must be in [-2, 2]")
        _require(
            0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty",
            self.repetition_penalty,
            "must be in [0.01, 100]",
        )
        self._check_lists()

    def _check_lists(self) -> None:
        num_biases, num_words = len(self.logit_bias), len(self.bad_words)
        _require(
            num_biases <= MAX_LOGIT_BIAS,
            "logit_bias",
            num_biases,
            f"may hold at most {MAX_LOGIT_BIAS} tokens",
        )
        for _, bias in self.logit_bias:
            _require(-100 <= bias <= 100, "logit_bias", bias, "must be in [-100, 100]")
        _require(
            num_words <= MAX_BAD_WORDS,
            "bad_words",
            num_words,
            f"may hold at most {MAX_BAD_WORDS} sequences",
        )
        for word in self.bad_words:
            _require(
                1 <= len(word) <= MAX_BAD_WORD_TOKENS,
                "bad_words",
                len(word),
                f"must each have 1 to {MAX_BAD_WORD_TOKENS} tokens",
            )
        _require(
            self.allowed_token_ids is None or bool(self.allowed_token_ids),
            "allowed_token_ids",
            0,
            "must hold at least one id",
        )

    @property
    def penalizes(self) -> bool:
        """Whether what was said before changes what comes next."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def masks(self) -> bool:
        """Whether some tokens are forbidden, besides those that would end it too early."""
        return bool(self.bad_words) or self.allowed_token_ids is not None or bool(self.grammar)

    @property
    def needs_last_token(self) -> bool:
        """Whether the last token must be known on the host before the next one is sampled."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def _require(ok: bool, field: str, value: float, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{field} {rule}, got {value}", field=field)
