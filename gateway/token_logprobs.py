"""How likely a generated token was, as clients of every wire format are told."""

import msgspec

from gateway.text_codec import TextTokenizer
from gateway.token_wishes import token_name
from jaxengine.outputs import TokenLogprobs

__all__ = ["TokenLogprob", "TopLogprob", "finite", "token_logprob"]

LEAST = -9999.0


class TopLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """How likely a token was; `bytes` is null for one that is not text."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprob(TopLogprob, kw_only=True, frozen=True):
    """How likely a generated token was, and what else was."""

    top_logprobs: tuple[TopLogprob, ...]


def token_logprob(
    tokenizer: TextTokenizer, token_id: int, found: TokenLogprobs, *, names_are_ids: bool = False
) -> TokenLogprob:
    """Return what is told of a token and of its alternatives, whose names may be their ids."""

    def told(other: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=f"token_id:{other}" if names_are_ids else token_name(tokenizer, other),
            logprob=finite(logprob),
            bytes=tuple(tokenizer.token_bytes(other)) or None,
        )

    itself = told(token_id, found.logprob)
    return TokenLogprob(
        token=itself.token,
        logprob=itself.logprob,
        bytes=itself.bytes,
        top_logprobs=tuple(told(other, logprob) for other, logprob in found.top),
    )


def finite(logprob: float) -> float:
    """Return a number that JSON can carry, also for a token that is impossible."""
    return max(logprob, LEAST)
