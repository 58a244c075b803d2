"""The error tree, and which status of the server gives which class."""

import re

import pytest

from headrace_client import errors
from headrace_client.errors import (
    BadRequest,
    GenerationTimeout,
    ModelNotFound,
    NotAllowed,
    Overloaded,
    RequestRejected,
    Unavailable,
    rejection,
)


def drawn_parents() -> dict[str, str]:
    """Read class and parent of each line of the tree in the module's docstring."""
    parents = {}
    path = ["HeadraceError"]
    for indent, name in re.findall(r"(?m)^([│ ]*)[├└]─ (\w+)", errors.__doc__ or ""):
        depth = len(indent) // 3 + 1
        parents[name] = path[depth - 1]
        path[depth:] = [name]
    return parents


def test_the_tree_that_is_drawn_is_the_tree_of_the_classes():
    names = set(errors.__all__) - {"rejection"}
    public_parents = {
        name: next(c.__name__ for c in getattr(errors, name).__mro__[1:] if c.__name__ in names)
        for name in names - {"HeadraceError"}
    }
    assert drawn_parents() == public_parents


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, NotAllowed),
        (403, NotAllowed),
        (404, ModelNotFound),
        (429, Overloaded),
        (503, Unavailable),
        # What has no class of its own is still caught as a refusal.
        (402, RequestRejected),
        (413, RequestRejected),
        (500, RequestRejected),
    ],
)
def test_the_status_decides_the_class_of_a_refusal(status, kind):
    assert rejection(status) is kind


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("first_token", "no token came within 0.5 s"),
        ("idle", "no further token came within 0.5 s"),
        ("total", "the answer was not complete within 0.5 s"),
    ],
)
def test_a_timeout_says_which_limit_passed(limit, text):
    error = GenerationTimeout(limit, 0.5)
    assert (str(error), error.limit, error.after_s) == (text, limit, 0.5)
