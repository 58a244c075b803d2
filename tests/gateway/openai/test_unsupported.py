import pytest

from gateway.errors import InvalidRequest
from gateway.openai.unsupported import CHAT_FIELDS, COMPLETION_FIELDS, refuse_unsupported


@pytest.mark.parametrize("fields", [CHAT_FIELDS, COMPLETION_FIELDS])
def test_null_and_neutral_values_of_every_field_pass(fields):
    refuse_unsupported(dict.fromkeys(fields), fields)
    for name, neutral in fields.items():
        for value in neutral:
            refuse_unsupported({name: value}, fields)


@pytest.mark.parametrize("fields", [CHAT_FIELDS, COMPLETION_FIELDS])
def test_any_other_value_of_every_field_is_refused_by_name(fields):
    for name in fields:
        with pytest.raises(InvalidRequest) as caught:
            refuse_unsupported({name: ["something", "else"]}, fields)
        assert caught.value.param == name


@pytest.mark.parametrize(
    "body", [{"best_of": True}, {"length_penalty": True}, {"use_beam_search": 0}]
)
def test_a_boolean_is_no_number(body):
    with pytest.raises(InvalidRequest):
        refuse_unsupported(body, COMPLETION_FIELDS)


def test_floats_that_equal_a_neutral_integer_pass():
    refuse_unsupported({"best_of": 1.0, "length_penalty": 1.0}, COMPLETION_FIELDS)
