import asyncio
import json
import threading

import pytest

from fakes import BOS, EOS, IM_START, byte_tokenizer
from gateway.errors import InvalidRequest, Overloaded
from gateway.grammars import MAX_CACHED_GRAMMARS, MAX_WAITING, GrammarCompiler, Structure


@pytest.fixture
def compiler():
    compiler = GrammarCompiler(byte_tokenizer(), eos_token_ids=(EOS,))
    yield compiler
    compiler.close()


def structure(kind, text):
    return Structure(kind=kind, text=text, param="field")


def allowed(matcher):
    mask = int.from_bytes(matcher.mask(), "little")
    return {i for i in range(300) if mask >> i & 1}


def follow(matcher, text):
    """Take the text in; return whether every byte was allowed."""
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        matcher.accept(byte)
    return True


async def test_a_choice_is_followed_byte_by_byte(compiler):
    matcher = (await compiler.compile(structure("choice", '["yes", "yet", "no"]'))).new_matcher()
    assert allowed(matcher) == {ord("y"), ord("n")}
    assert follow(matcher, "ye")
    assert allowed(matcher) == {ord("s"), ord("t")}
    assert not matcher.is_complete
    assert follow(matcher, "s")
    assert matcher.is_complete


async def test_an_answer_that_may_go_on_may_also_end(compiler):
    matcher = (await compiler.compile(structure("regex", "[ab]{1,3}"))).new_matcher()
    assert follow(matcher, "a")
    assert allowed(matcher) == {ord("a"), ord("b"), EOS}
    assert not matcher.is_complete


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", SCHEMA, '{"a": 12', '{"a": "'),
        ("json_schema", SCHEMA, '{\n "a"', '{"b"' * 2),
        ("json_schema", '{"type": "object"}', '{"b": [1, {"c": null}]}', "[1]"),
        ("grammar", 'root ::= "x" [0-9]+', "x1", "y"),
        ("grammar", 'start: "x" /[0-9]+/', "x1", "xx"),
    ],
)
async def test_only_what_matches_is_allowed(compiler, kind, text, good, bad):
    grammar = await compiler.compile(structure(kind, text))
    assert follow(grammar.new_matcher(), good)
    assert not follow(grammar.new_matcher(), bad)


async def test_white_space_ends_some_time(compiler):
    matcher = (await compiler.compile(structure("json_schema", SCHEMA))).new_matcher()
    assert follow(matcher, "{" + " " * 16)
    assert ord(" ") not in allowed(matcher)


TAGS = json.dumps(
    [
        {"trigger": "<f=", "begin": "<f=add>", "schema": json.loads(SCHEMA), "end": "</f>"},
        {"trigger": "<f=", "begin": '<f="\n>', "schema": None, "end": ""},
    ]
)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("just text < f <f", ""),
        ('x<f=add>{"a": 1}</f> and <f="\n>[null] so', ""),
        ("<f=", "sub>"),
        ("<f=add>", "[1]"),
        ('<f=add>{"a": 1}', " and"),
        ("<f=add>{" + " " * 16, " "),
        ('<f=add>{"a": 1}</f><f=', "x"),
    ],
)
async def test_between_marks_text_matches_their_schema(compiler, good, bad):
    grammar = await compiler.compile(structure("structural_tag", TAGS))
    matcher = grammar.new_matcher()
    assert follow(matcher, good)
    # An answer may end only outside of marks.
    assert (EOS in allowed(matcher)) == (bad == "")
    assert not bad or not follow(matcher, bad)


async def test_special_tokens_are_never_part_of_an_answer(compiler):
    grammar = await compiler.compile(structure("regex", "(?s:.*)"))
    assert not {BOS, IM_START} & allowed(grammar.new_matcher())


async def test_every_matcher_is_its_own(compiler):
    grammar = await compiler.compile(structure("choice", '["ab", "cd"]'))
    first, second = grammar.new_matcher(), grammar.new_matcher()
    assert follow(first, "a")
    assert allowed(second) == {ord("a"), ord("c")}


async def test_a_token_that_does_not_match_leaves_nothing_to_allow(compiler):
    matcher = (await compiler.compile(structure("choice", '["ab"]'))).new_matcher()
    matcher.accept(ord("z"))
    assert not matcher.is_complete
    assert allowed(matcher) == set()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "wizard"}'),
        ("json_schema", '{"not": {"type": "string"}}'),
        ("json_schema", '{"$ref": "http://example.com/schema"}'),
        ("json_schema", '{"type": "object", "patternProperties": {"(": {}}}'),
        ("json_schema", '{"a":' * 100_000),
        ("json_schema", '{"type": "string", "description": "' + "x" * 300_000 + '"}'),
        ("regex", "(a"),
        ("grammar", 'start: "a" missing'),
        ("grammar", "@@@"),
        ("structural_tag", TAGS.replace('"integer"', '"wizard"')),
    ],
    ids=range(10),
)
async def test_what_cannot_be_compiled_is_refused_by_name(compiler, kind, text):
    for _ in range(2):  # from the cache as well
        with pytest.raises(InvalidRequest) as caught:
            await compiler.compile(structure(kind, text))
        assert caught.value.param == "field"


async def test_the_cache_knows_what_was_used_and_is_bounded(compiler):
    first = await compiler.compile(structure("choice", '["ab"]'))
    assert await compiler.compile(structure("choice", '["ab"]')) is first
    for i in range(MAX_CACHED_GRAMMARS):
        await compiler.compile(structure("choice", f'["x{i}"]'))
    assert await compiler.compile(structure("choice", '["ab"]')) is not first


async def test_the_engine_says_what_ends_an_answer_where_the_tokenizer_does_not():
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = ()
    compiler = GrammarCompiler(tokenizer, eos_token_ids=(EOS, 10**6))  # the other has no text
    try:
        matcher = (await compiler.compile(structure("regex", "a"))).new_matcher()
        assert follow(matcher, "a")
        assert matcher.is_complete or allowed(matcher) == {EOS}
    finally:
        compiler.close()


async def test_a_model_whose_answers_never_end_is_a_reason_to_refuse():
    compiler = GrammarCompiler(byte_tokenizer(), eos_token_ids=())
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="no token that ends an answer") as caught:
                await compiler.compile(structure("regex", "a"))
            assert caught.value.param == "field"
    finally:
        compiler.close()


class Blocking:
    """A tokenizer that is not read before its time."""

    def __init__(self):
        self.inner = byte_tokenizer()
        self.is_wanted = threading.Event()
        self.may_go_on = threading.Event()
        self.is_broken = False

    def __getattr__(self, name):
        self.is_wanted.set()
        self.may_go_on.wait()
        if self.is_broken:
            raise RuntimeError("broken")
        return getattr(self.inner, name)


async def test_what_takes_too_long_is_refused_and_who_waits_for_it_is_not_blamed():
    tokenizer = Blocking()
    compiler = GrammarCompiler(tokenizer, eos_token_ids=(EOS,), timeout_s=0.001)
    try:
        with pytest.raises((InvalidRequest, Overloaded)):  # the thread may need longer to start
            await compiler.compile(structure("regex", "a"))
        await asyncio.to_thread(tokenizer.is_wanted.wait)
        with pytest.raises(InvalidRequest, match=r"takes longer than 0\.001 s") as caught:
            await compiler.compile(structure("regex", "a"))
        assert caught.value.param == "field"
        for i in range(1, MAX_WAITING):
            with pytest.raises(Overloaded, match="other grammars are being compiled"):
                await compiler.compile(structure("regex", f"a{i}"))
        with pytest.raises(Overloaded, match="too many grammars wait"):
            await compiler.compile(structure("regex", "b"))
    finally:
        tokenizer.may_go_on.set()
        compiler.close()


async def test_a_failure_of_our_own_is_not_remembered():
    tokenizer = Blocking()
    tokenizer.may_go_on.set()
    tokenizer.is_broken = True
    compiler = GrammarCompiler(tokenizer, eos_token_ids=(EOS,))
    try:
        with pytest.raises(RuntimeError, match="broken"):
            await compiler.compile(structure("regex", "a"))
        tokenizer.is_broken = False
        matcher = (await compiler.compile(structure("regex", "a"))).new_matcher()
        assert follow(matcher, "a")
    finally:
        compiler.close()
