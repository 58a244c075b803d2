"""Which tokens a request may get next, as the host knows it: history, bad words, and grammar."""

from array import array
from collections.abc import Collection, Sequence

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
        self._eos_token_ids = tuple(eos_token_ids)
        self._end_token_ids = frozenset(end_token_ids)
        self._generated: list[int] = []
        self._matcher: Matcher | None = None
        self._allowed = -1  # a bit for each token that the last mask allows
        self._always_allowed: int | None = None

    def mask(self, num_bytes: int) -> bytes:
        """Return the tokens that may come next: token i is bit i % 8 of byte i // 8."""
        params = self.params
        allowed = self._base(num_bytes)
        if params.grammar is not None:
            if self._matcher is None:
                self._matcher = params.grammar.new_matcher()
            allowed &= self._grammatical(self._matcher)
        for word in params.bad_words:
            start = len(self._generated) - len(word) + 1
            if start >= 0 and self._generated[start:] == list(word[:-1]):
                allowed &= ~(1 << word[-1])
        if len(self._generated) < params.min_tokens:
            for token_id in self._end_token_ids:
                allowed &= ~(1 << token_id)
        self._allowed = allowed
        return allowed.to_bytes(num_bytes, "little")

    def allows(self, token_id: int) -> bool:
        """Whether a sampled token is one that the last mask allows; not so at a dead end."""
        return not self.params.masks or bool(self._allowed >> token_id & 1)

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
            if ids is None:
                self._always_allowed = (1 << 8 * num_bytes) - 1
            else:
                bits = bytearray(num_bytes)
                for token_id in ids:
                    bits[token_id // 8] |= 1 << token_id % 8
                self._always_allowed = int.from_bytes(bits, "little")
        return self._always_allowed

    def _grammatical(self, matcher: Matcher) -> int:
        """Return what the grammar allows; where one EOS may come, all may that end the answer."""
        allowed = int.from_bytes(matcher.mask(), "little")
        eos = 0
        for token_id in self._eos_token_ids:
            eos |= 1 << token_id
        if not allowed & eos:
            return allowed
        allowed &= ~eos
        for token_id in self._end_token_ids.intersection(self._eos_token_ids):
            allowed |= 1 << token_id
        return allowed
