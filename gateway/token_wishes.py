"""What a client wants to know about single tokens, and which it wants more or less of."""

from dataclasses import dataclass, replace

from gateway.errors import InvalidRequest
from gateway.grammars import Structure
from gateway.text_codec import TextTokenizer
from jaxengine.sampling_params import SamplingParams

__all__ = ["NO_WISHES", "TokenWishes", "token_name", "with_wishes"]

MAX_BAD_WORDS = 256  # the engine bounds what becomes of them, which is known too late
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_BAD_WORDS_LENGTH = 8192  # of all together; they are tokenized on the event loop


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWishes:
    """Wishes of one request; the defaults ask for nothing.

    Attributes:
        bad_words: texts that must not be generated.
        structure: what the answer must match.
        Others: as in SamplingParams.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structure: Structure | None = None


NO_WISHES = TokenWishes()


def with_wishes(
    params: SamplingParams, wishes: TokenWishes, tokenizer: TextTokenizer, *, vocab_size: int
) -> SamplingParams:
    """Return the parameters with what is wished for, but for the structure.

    Raises:
        InvalidRequest: an id outside the vocabulary, too many bad words, or one of no or too many
            characters.
        jaxengine.errors.InvalidRequestError: a value is out of range.
    """
    _check_ids("logit_bias", [token_id for token_id, _ in wishes.logit_bias], vocab_size)
    _check_ids("allowed_token_ids", wishes.allowed_token_ids or (), vocab_size)
    return replace(
        params,
        logprobs=wishes.logprobs,
        prompt_logprobs=wishes.prompt_logprobs,
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        repetition_penalty=wishes.repetition_penalty,
        logit_bias=wishes.logit_bias,
        bad_words=_bad_words(wishes.bad_words, tokenizer),
        allowed_token_ids=wishes.allowed_token_ids,
    )


def token_name(tokenizer: TextTokenizer, token_id: int) -> str:
    """Return how clients are told a token: by its text, or by its bytes if these are none.

    So two tokens that are each a part of a character have different names.
    """
    text = tokenizer.token_bytes(token_id)
    if not text:  # a special token, or a row of the embedding that is no token
        return tokenizer.decode([token_id], skip_special=False) or f"token_id:{token_id}"
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _check_ids(param: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise InvalidRequest(f"{param} must hold ids from 0 to {vocab_size - 1}", param=param)


def _bad_words(words: tuple[str, ...], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word, as it is written at the beginning and after a space."""
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORDS_LENGTH:
        raise InvalidRequest(
            f"bad_words may hold at most {MAX_BAD_WORDS} words "
            f"of {MAX_BAD_WORDS_LENGTH} characters together",
            param="bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_LENGTH:
            raise InvalidRequest(
                f"each of bad_words must have 1 to {MAX_BAD_WORD_LENGTH} characters",
                param="bad_words",
            )
        found[tuple(tokenizer.encode(word))] = None
        found[tuple(tokenizer.encode(" " + word))] = None
    return tuple(ids for ids in found if ids)
