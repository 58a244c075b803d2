"""What the text of an answer must look like, compiled for the tokens of the model by llguidance."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import orjson
from llguidance import LLMatcher, LLTokenizer, StructTag, TokenizerWrapper, grammar_from

from gateway.errors import InvalidRequest, Overloaded, sanitize
from gateway.text_codec import TextTokenizer

__all__ = ["GrammarCompiler", "Structure"]

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CACHED_GRAMMARS = 256
MAX_WAITING = 64  # grammars that are being compiled, or wait for it
COMPILE_TIMEOUT_S = 10.0

# Else a small model may write white space for ever.
WHITESPACE = r"[ \n\t]{1,16}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """What an answer must match.

    Attributes:
        kind: "json_schema" takes a schema as JSON, "choice" a JSON list of texts, "regex" a
            regular expression of Rust's regex crate, "grammar" Lark or GBNF, "structural_tag" a
            JSON list of {trigger, begin, schema, end}.
        text: that.
        param: the client's field, for errors.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
    text: str
    param: str


@dataclass(frozen=True, slots=True)
class _Job:
    """A grammar that is known or being made.

    Attributes:
        begun: done once its turn has come.
        future: the grammar, or what is wrong with it.
    """

    begun: asyncio.Future[None]
    future: "asyncio.Future[_Grammar | str]"


class GrammarCompiler:
    """Compiles off the event loop, one at a time, and remembers what was used last.

    Owns: a thread; `close` ends it.

    Args:
        eos_token_ids: what ends an answer, as the engine has it; the tokenizer may not know.
        timeout_s: how long a client waits for its turn, and then for its grammar. The thread
            cannot be stopped, but llguidance bounds its own work.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        eos_token_ids: Collection[int],
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._backend: LLTokenizer | None = None
        self._cache: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._num_waiting = 0

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def compile(self, structure: Structure) -> "_Grammar":
        """Return the grammar. Cancelling is safe.

        Raises:
            InvalidRequest: it cannot be compiled, or not in time; `param` is the structure's.
            Overloaded: too many wait, or its turn did not come in time.
        """
        if len(structure.text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{structure.param} may have at most {MAX_GRAMMAR_BYTES} bytes",
                param=structure.param,
            )
        job = self._find(structure)
        either: list[asyncio.Future[Any]] = [job.begun, job.future]
        begun, _ = await asyncio.wait(
            either, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not begun:
            raise Overloaded("other grammars are being compiled", retry_after_s=1)
        done, _ = await asyncio.wait([job.future], timeout=self._timeout_s)
        if not done:
            raise InvalidRequest(
                f"{structure.param} takes longer than {self._timeout_s:g} s to compile",
                param=structure.param,
            )
        found = job.future.result()
        if isinstance(found, str):
            raise InvalidRequest(f"{structure.param}: {sanitize(found)}", param=structure.param)
        return found

    def _find(self, structure: Structure) -> _Job:
        """Return what is known, or being made; make it otherwise."""
        key = structure.kind, structure.text
        job = self._cache.get(key)
        if job is None:
            if self._num_waiting >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled", retry_after_s=1)
            self._num_waiting += 1
            loop = asyncio.get_running_loop()
            begun: asyncio.Future[None] = loop.create_future()
            note_begun = partial(loop.call_soon_threadsafe, begun.set_result, None)
            job = _Job(
                begun,
                loop.run_in_executor(self._executor, self._compile_here, structure, note_begun),
            )
            job.future.add_done_callback(partial(self._note_done, key))
            self._cache[key] = job
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return job

    def _note_done(self, key: tuple[str, str], future: "asyncio.Future[_Grammar | str]") -> None:
        self._num_waiting -= 1
        job = self._cache.get(key)
        # What failed for a reason that we do not know may work the next time.
        has_failed = future.cancelled() or future.exception() is not None
        if has_failed and job is not None and job.future is future:
            del self._cache[key]

    def _compile_here(
        self, structure: Structure, note_begun: Callable[[], object]
    ) -> "_Grammar | str":
        """Return the grammar, or what is wrong with it. Runs in the thread."""
        note_begun()
        try:
            text = _grammar_text(structure)
        except (ValueError, RecursionError) as exc:
            return str(exc)
        if self._backend is None:
            eos_ids = [i for i in self._eos_token_ids if i < self._tokenizer.vocab_size]
            if not eos_ids:
                return "this model has no token that ends an answer"
            self._backend = _backend_tokenizer(self._tokenizer, eos_ids)
        matcher = LLMatcher(self._backend, text, log_level=0)
        if matcher.is_error():
            return matcher.get_error()
        return _Grammar(matcher)


class _Grammar:
    """A compiled grammar; implements jaxengine.sampling_params.Grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def new_matcher(self) -> "_Matcher":
        return _Matcher(self._matcher.deep_copy())


class _Matcher:
    """Where one answer stands; implements jaxengine.sampling_params.Matcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> bytes:
        """Return what may come next; nothing once llguidance has given up."""
        mask = self._matcher.compute_bitmask()
        return b"" if self._matcher.is_error() else mask

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


class _Tokens:
    """A tokenizer as llguidance wants one."""

    def __init__(self, tokenizer: TextTokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        # What adds nothing to a text is a special token; it is never part of an answer.
        self.special_token_ids = [i for i in ids if not self.tokens[i]]
        for i in self.special_token_ids:
            self.tokens[i] = tokenizer.decode([i], skip_special=False).encode() or b"<%d>" % i
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text)


def _backend_tokenizer(tokenizer: TextTokenizer, eos_ids: list[int]) -> LLTokenizer:
    return LLTokenizer(
        TokenizerWrapper(_Tokens(tokenizer, eos_ids[0])),
        n_vocab=tokenizer.vocab_size,
        eos_token=eos_ids,
    )


def _grammar_text(structure: Structure) -> str:
    """Return llguidance's form of it.

    Raises:
        ValueError: it has none.
    """
    if structure.kind == "json_schema":
        schema = orjson.loads(structure.text)
        return LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    if structure.kind == "structural_tag":
        tags = [
            StructTag(
                trigger=part["trigger"],
                begin=part["begin"],
                grammar={
                    **(part["schema"] or {}),
                    "x-guidance": {"whitespace_pattern": WHITESPACE},
                },
                end=part["end"],
            )
            for part in orjson.loads(structure.text)
        ]
        # Marks are text: special tokens are no part of an answer.
        return StructTag.to_grammar(tags, assume_special=False)
    return grammar_from(structure.kind, structure.text)
