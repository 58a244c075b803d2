import math

import pytest

from fakes import EOS, byte_tokenizer
from gateway.token_logprobs import TokenLogprob, TopLogprob, finite, token_logprob
from jaxengine.outputs import TokenLogprobs

CUT = "🧎".encode()[:2]


def test_a_token_and_its_alternatives_are_told_with_their_true_bytes():
    found = TokenLogprobs(-0.5, ((259, -0.25), (EOS, -2.0)))
    assert token_logprob(byte_tokenizer(CUT), ord("a"), found) == TokenLogprob(
        token="a",
        logprob=-0.5,
        bytes=(97,),
        top_logprobs=(
            TopLogprob(token="bytes:\\xf0\\x9f", logprob=-0.25, bytes=(0xF0, 0x9F)),
            TopLogprob(token="<|im_end|>", logprob=-2.0, bytes=None),  # no text
        ),
    )


def test_names_may_be_ids():
    told = token_logprob(
        byte_tokenizer(), 97, TokenLogprobs(-0.5, ((98, -1.0),)), names_are_ids=True
    )
    assert (told.token, told.top_logprobs[0].token) == ("token_id:97", "token_id:98")


@pytest.mark.parametrize(("logprob", "told"), [(-0.5, -0.5), (-math.inf, -9999.0)])
def test_what_json_cannot_carry_is_told_as_the_least_number(logprob, told):
    assert finite(logprob) == told
    entry = token_logprob(byte_tokenizer(), 97, TokenLogprobs(logprob, ((98, logprob),)))
    assert (entry.logprob, entry.top_logprobs[0].logprob) == (told, told)
