import pytest

from fakes import EOS, byte_tokenizer
from gateway.errors import InvalidRequest
from gateway.token_wishes import TokenWishes, token_name, with_wishes
from jaxengine.errors import InvalidRequestError
from jaxengine.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=4)


def wished(**fields):
    return with_wishes(PARAMS, TokenWishes(**fields), byte_tokenizer(), vocab_size=259)


def test_nothing_is_the_default():
    assert wished() == PARAMS


def test_wishes_reach_the_engine():
    fields = {
        "logprobs": 3,
        "prompt_logprobs": 0,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": ((5, 1.0),),
        "allowed_token_ids": (5, 6),
    }
    params = wished(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_a_bad_word_is_bad_after_a_space_too():
    assert wished(bad_words=("ab",)).bad_words == ((97, 98), (32, 97, 98))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": ((259, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": ("x" * 257,)}, "bad_words"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        wished(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": ((5, float("inf")),)}, "logit_bias"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_values_out_of_range_are_refused_by_the_engine(fields, field):
    with pytest.raises(InvalidRequestError) as caught:
        wished(**fields)
    assert caught.value.field == field


def test_tokens_are_named_by_their_text_or_bytes():
    tokenizer = byte_tokenizer("word", "é".encode()[:1])
    assert token_name(tokenizer, ord("a")) == "a"
    assert token_name(tokenizer, 259) == "word"
    assert token_name(tokenizer, 260) == "bytes:\\xc3"
    assert token_name(tokenizer, 0xA9) == "bytes:\\xa9"
    assert token_name(tokenizer, EOS) == "<|im_end|>"


@pytest.mark.parametrize("words", [("a",) * 257, ("x" * 256,) * 33])
def test_too_many_bad_words_are_refused_before_one_is_tokenized(words):
    class NoTokenizer:
        def encode(self, text):
            raise AssertionError("this takes time")

    with pytest.raises(InvalidRequest, match="at most 256 words of 8192 characters") as caught:
        with_wishes(PARAMS, TokenWishes(bad_words=words), NoTokenizer(), vocab_size=259)
    assert caught.value.param == "bad_words"


def test_a_row_of_the_embedding_that_is_no_token_is_named_by_its_id():
    assert token_name(byte_tokenizer(), 100_000) == "token_id:100000"
