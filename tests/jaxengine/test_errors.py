import pytest

from jaxengine import errors
from jaxengine.errors import EngineError, InvalidRequestError, QueueFullError


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_of_the_engine_can_be_caught_as_one(name):
    assert issubclass(getattr(errors, name), EngineError)


@pytest.mark.parametrize("name", errors.__all__)
def test_the_tree_in_the_docstring_has_every_error(name):
    assert name in errors.__doc__


def test_an_invalid_request_names_the_field_and_may_give_a_code():
    plain = InvalidRequestError("too hot", field="temperature")
    assert (str(plain), plain.field, plain.code) == ("too hot", "temperature", None)
    coded = InvalidRequestError("too long", field="prompt", code="context_length_exceeded")
    assert coded.code == "context_length_exceeded"


def test_a_full_queue_says_when_to_come_back():
    error = QueueFullError("full", retry_after_s=2.5)
    assert (str(error), error.retry_after_s) == ("full", 2.5)
