"""Chat messages to prompt tokens, through the model's own jinja2 template.

A template is a program, so it comes from the model or the operator, never from a request, and runs
in jinja2's immutable sandbox. (The sandbox bounds what a template can reach, not its time or
memory: one more reason not to take it from a request.)

**User text cannot forge special tokens.** Tokenizing the rendered text as it is would turn an
"<|im_end|>" that a user typed into the token that ends a turn. Cutting the contents out and
tokenizing them alone would give other tokens than the model was trained on, because tokens reach
across the borders of a message. So the template is rendered twice: as asked, and with an
unguessable placeholder for every content. In the second text every special token was written by
the template. Cut there, with the contents put back and each stretch between two special tokens
encoded as a whole and as plain text, it gives the tokens of the first text, minus forged ones.

That works when the contents put back give the first text, as they were or without white space
around them (many templates trim). Where a template does more to contents, such as cutting out a
chain of thought, it is rendered once more with the contents as they are, except that a mark is put
inside every special token that they spell out; the marks are taken out again after cutting. As a
template could still paste a forged token together out of pieces, the special tokens that result
must be those of the text with placeholders, one by one; otherwise the messages are refused.
"""

import datetime
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text_codec import ChatMessage, TextTokenizer
from gateway.tokenizer import split_at
from gateway.tokenizer_files import token_text
from jaxengine.errors import ModelError
from jaxengine.weights.gguf import GGUFFile
from jaxengine.weights.hf_config import read_json_object
from jaxengine.weights.source import ModelFiles

__all__ = ["ChatTemplate", "ChatTemplateError"]

# Roles reach the rendered text as they are, so only known ones may.
ROLES = frozenset({"system", "user", "assistant", "tool"})
# OpenAI's newer name of the system role, which templates do not know.
ROLE_ALIASES = {"developer": "system"}
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
MAX_MESSAGE_CHARS = 300
UNSAFE = (
    "the chat template of this model decides by the contents of messages where its special tokens "
    "go, in a way that cannot be told from forged ones"
)


class ChatTemplateError(ValueError):
    """The messages cannot be rendered; one line, fit for the client."""


class ChatTemplate:
    """One model's chat template. Nothing changes after construction, so threads may share it.

    Args:
        source: jinja2 text, as Hugging Face's tokenizers carry it.
        tokens: texts of tokens that templates refer to, such as bos_token and eos_token.
        origin: what to call the template in an error.

    Attributes:
        source, tokens: as given.

    Raises:
        ModelError: the template is not valid jinja2.
    """

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str] | None = None,
        origin: str = "the chat template",
    ) -> None:
        self.source = source
        self.tokens = dict(tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"{origin} is not a valid template: {_one_line(error)}") from error

    @classmethod
    def from_model(cls, files: ModelFiles, *, source: str | None = None) -> "ChatTemplate | None":
        """The template of a model, or None if it has none.

        Args:
            files: the model.
            source: an operator's template to use in place of the model's.

        Raises:
            ModelError: the files are damaged, or the template is not valid.
        """
        found, tokens = _from_gguf(files.path) if files.kind == "gguf" else _from_dir(files.path)
        if source is not None:
            return cls(source, tokens=tokens)
        if found is None:
            return None
        return cls(found, tokens=tokens, origin=f"the chat template of {files.name}")

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt as text, for display only: in it, forged special tokens look like real ones.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        contents = [message.content for message in messages]
        return self._render(messages, contents, add_generation_prompt, _clock())

    def encode(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of the prompt; see the module's docstring.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        contents = [message.content for message in messages]
        clock = _clock()
        text = self._render(messages, contents, add_generation_prompt, clock)
        marks = _Marks(f"{secrets.randbits(128):039d}")
        try:
            skeleton = self._render(
                messages, marks.placeholders(contents), add_generation_prompt, clock
            )
            parts = split_at(skeleton, tokenizer.find_special(skeleton))
            for restored in (contents, [content.strip() for content in contents]):
                if marks.fill(skeleton, restored) == text:
                    return tokenizer.encode_parts(
                        [p if isinstance(p, int) else marks.fill(p, restored) for p in parts]
                    )
            guarded = [
                marks.guard(content, tokenizer.find_special(content)) for content in contents
            ]
            text = self._render(messages, guarded, add_generation_prompt, clock)
        except ChatTemplateError as error:
            # Only the marks can be at fault, and they must not show in a message.
            raise ChatTemplateError(UNSAFE) from error
        own = split_at(text, tokenizer.find_special(text))
        if _ids(own) != _ids(parts):
            raise ChatTemplateError(UNSAFE)
        return tokenizer.encode_parts([p if isinstance(p, int) else marks.unguard(p) for p in own])

    def _render(
        self,
        messages: Sequence[ChatMessage],
        contents: Sequence[str],
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
    ) -> str:
        if not messages:
            raise ChatTemplateError("there must be at least one message")
        rows = []
        for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
            role = ROLE_ALIASES.get(message.role, message.role)
            if role not in ROLES:
                known = ", ".join(sorted(ROLES | ROLE_ALIASES.keys()))
                raise ChatTemplateError(
                    f"[{index}].role must be one of {known}, got {message.role[:40]!r}"
                )
            rows.append({"role": role, "content": content})
        try:
            return self._template.render(
                messages=rows,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                strftime_now=strftime_now,
                **self.tokens,
            )
        except Exception as error:
            # A template is somebody else's program: whatever it raises is about these messages.
            raise ChatTemplateError(
                f"the chat template of this model refuses the messages: {_one_line(error)}"
            ) from error


@dataclass(frozen=True, slots=True)
class _Marks:
    """Strings put into message contents to find them again in the rendered text.

    Attributes:
        nonce: unguessable, so that no content can pose as a mark; digits only, so that it survives
            a change of case.
    """

    nonce: str

    def placeholders(self, contents: Sequence[str]) -> list[str]:
        """What to render in place of each content."""
        # White space forges nothing, and templates ask whether there is anything else.
        return [
            f"{self.nonce}.{index}." if content.strip() else content
            for index, content in enumerate(contents)
        ]

    def fill(self, text: str, contents: Sequence[str]) -> str:
        """The text with contents in place of their placeholders."""
        pattern = rf"{self.nonce}\.([0-9]+)\."
        return re.sub(pattern, lambda match: contents[int(match[1])], text)

    def guard(self, content: str, special: Sequence[tuple[int, int, int]]) -> str:
        """Break every special token found in a content, after its first character."""
        pieces = []
        position = 0
        for start, _, _ in special:
            pieces += [content[position : start + 1], self.nonce]
            position = start + 1
        return "".join([*pieces, content[position:]])

    def unguard(self, text: str) -> str:
        return text.replace(self.nonce, "")


def _ids(parts: Sequence[str | int]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]


def _clock() -> Callable[[str], str]:
    """Formatter of one moment, so that both renderings of a prompt show the same time."""
    return datetime.datetime.now().strftime


def _from_dir(directory: Path) -> tuple[str | None, dict[str, str]]:
    """Template and named tokens of a model directory."""
    config_path = directory / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.exists() else {}
    tokens = {name: text for name in TOKEN_NAMES if (text := token_text(config.get(name)))}
    jinja_path = directory / "chat_template.jinja"
    if jinja_path.exists():
        try:
            return jinja_path.read_text(encoding="utf-8"), tokens
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {jinja_path}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        # Several named ones, for tools or retrieval; plain chat is the default.
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return template if isinstance(template, str) else None, tokens


def _from_gguf(path: Path) -> tuple[str | None, dict[str, str]]:
    """Template and named tokens of a GGUF file."""
    metadata = GGUFFile(path).metadata
    listed = metadata.get("tokenizer.ggml.tokens")
    tokens: dict[str, str] = {}
    for name, key in zip(TOKEN_NAMES, ("bos", "eos", "padding", "unknown"), strict=True):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(listed, list) and type(token_id) is int and 0 <= token_id < len(listed):
            tokens[name] = listed[token_id]
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None, tokens


class _GenerationTag(Extension):
    """Lets ``{% generation %}`` through, which marks answers for training and prints its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    """What templates call to refuse messages."""
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON as models were trained on: not escaped for HTML, characters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MAX_MESSAGE_CHARS]
