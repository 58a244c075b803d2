import msgspec
import pytest

from gateway.errors import InvalidRequest
from gateway.messages import StartRequest
from gateway.token_fields import TokenFields, json_structure
from gateway.token_wishes import NO_WISHES


def wishes(**fields):
    return msgspec.convert(fields, TokenFields).wishes()


def test_nothing_and_null_ask_for_nothing():
    assert wishes() == NO_WISHES
    assert wishes(**dict.fromkeys(TokenFields.__struct_fields__)) == NO_WISHES
    assert wishes(logit_bias={}, bad_words=[], allowed_token_ids=[]) == NO_WISHES


def test_fields_become_wishes():
    found = wishes(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"7": 1, "8": -2.5},
        bad_words=["x"],
        allowed_token_ids=[7, 8],
        structured_outputs={"choice": ["a"]},
    )
    assert (found.presence_penalty, found.frequency_penalty) == (0.5, -0.5)
    assert (found.repetition_penalty, found.bad_words) == (1.5, ("x",))
    assert found.logit_bias == ((7, 1.0), (8, -2.5))
    assert found.allowed_token_ids == (7, 8)
    assert found.structure.kind == "choice"


def test_a_token_has_one_bias_however_it_is_written():
    assert wishes(logit_bias={"7": 1, "07": 2}).logit_bias == ((7, 2.0),)


@pytest.mark.parametrize("key", ["", "-1", "a", "1.0", "²", "1" * 20])
def test_a_bias_of_no_token_is_refused_by_name(key):
    with pytest.raises(InvalidRequest) as caught:
        wishes(logit_bias={key: 1})
    assert caught.value.param == f"logit_bias.{key}"


def test_a_schema_that_is_nested_too_deeply_is_refused():
    schema = {}
    for _ in range(600):
        schema = {"a": schema}
    with pytest.raises(InvalidRequest) as caught:
        json_structure(schema, "field")
    assert caught.value.param == "field"


def test_the_native_protocol_has_the_same_fields():
    request = StartRequest(prompt="x", bad_words=["y"], structured_outputs=None)
    assert set(TokenFields.__struct_fields__) <= set(StartRequest.__struct_fields__)
    assert request.wishes().bad_words == ("y",)
