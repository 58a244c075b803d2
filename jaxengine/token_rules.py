"""Which tokens a request may get next, as the host knows it: history, bad words, and grammar."""

from array import array
from collections.abc import Collection, Iterable, Sequence

from jaxengine.sampling_params import Matcher, SamplingParams

__all__ = ["GENERATED", "TokenRules"]

# Set in the ids of a history that were generated; the others are of the prompt.
GENERATED = 1 << 30


class TokenRules:
    """The state of one request's penalties and masks. Only the engine thread touches it.

    All of it follows from the tokens that are known on the host, so a preemption changes nothing.

    Args:
        params: they ask for penalties, biases or masks.
        prompt: the ids of the prompt.
        eos_token_ids: ids that end an answer of this model.
        end_token_ids: ids that end this one.

    Attributes:
        history: the ids so far, those generated with `GENERATED` set; empty without penalties.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        eos_token_ids: Collection[int],
        end_token_ids: Collection[int],
    ) -> None:
        self.params = params
        self.history = array("i", prompt if params.penalizes else ())
        self._end_token_ids = frozenset(end_token_ids)
        self._eos = _bits(eos_token_ids)
        self._ends = _bits(end_token_ids)
        self._longer_bad_words = [list(word) for word in params.bad_words if len(word) > 1]
        self._generated: list[int] = []
        self._matcher: Matcher | None = None
        self._allowed = -1  # a bit for each token that the last mask allows, min_tokens aside
        self._always_allowed: int | None = None

    def mask(self, num_bytes: int, *, num_before: int) -> bytes:
        """Return the tokens that may come next: token i is bit i % 8 of byte i // 8.

        Args:
            num_bytes: as many as are returned.
            num_before: tokens of the answer before that one, also those that are on their way.
        """
        params = self.params
        allowed = self._base(num_bytes)
        if params.grammar is not None:
            if self._matcher is None:
                self._matcher = params.grammar.new_matcher()
            allowed &= self._grammatical(self._matcher)
        for word in self._longer_bad_words:
            start = len(self._generated) - len(word) + 1
            if start >= 0 and self._generated[start:] == word[:-1]:
                allowed &= ~(1 << word[-1])
        self._allowed = allowed
        if num_before < params.min_tokens:
            allowed &= ~self._ends
        return allowed.to_bytes(num_bytes, "little")

    def allows(self, token_id: int) -> bool:
        """Whether the next token, which was sampled, is one that may come; not so at a dead end.

        Without rules that need the last token, masks differ by `min_tokens` only. So the last one
        tells the rest, even if it was made for a later token.
        """
        if not self.params.masks:
            return True
        is_early = len(self._generated) < self.params.min_tokens
        may_come = bool(self._allowed >> token_id & 1)
        return may_come and not (is_early and token_id in self._end_token_ids)

    def append(self, token_id: int) -> None:
        """Take in a token that was sampled."""
        if self.params.penalizes:
            self.history.append(token_id | GENERATED)
        if self.params.masks:
            self._generated.append(token_id)
        if self._matcher is not None and token_id not in self._end_token_ids:
            self._matcher.accept(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches its grammar and nothing may follow."""
        return self._matcher is not None and self._matcher.is_complete

    def _base(self, num_bytes: int) -> int:
        if self._always_allowed is None:
            ids = self.params.allowed_token_ids
            allowed = (1 << 8 * num_bytes) - 1 if ids is None else _bits(ids)
            never = _bits(word[0] for word in self.params.bad_words if len(word) == 1)
            self._always_allowed = allowed & ~never
        return self._always_allowed

    def _grammatical(self, matcher: Matcher) -> int:
        """Return what the grammar allows; where one EOS may come, all may that end the answer."""
        allowed = int.from_bytes(matcher.mask(), "little")
        if not allowed & self._eos:
            return allowed
        return allowed & ~self._eos | self._eos & self._ends


def _bits(token_ids: Iterable[int]) -> int:
    """Return an integer with a bit for each of these tokens."""
    ids = list(token_ids)
    bits = bytearray(max(ids, default=0) // 8 + 1)
    for token_id in ids:
        bits[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(bits, "little")
