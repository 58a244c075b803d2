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

Definitions of tools and the calls in messages cannot be replaced by placeholders, because templates
look into them. Their strings carry a mark behind everything that a special token may begin with,
in both renderings, so that no token is found in them nor across their borders.
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
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text_codec import ChatMessage, MessageCall, TextTokenizer, ToolDefinition
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
MAX_DEPTH = 64  # of definitions of tools and of arguments
TOKEN_BEGINNINGS = re.compile(r"[<\[]")  # of special tokens, where they span borders of strings
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
        renders_tools: whether the template has a place for definitions of tools.

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
            names = meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"{origin} is not a valid template: {_one_line(error)}") from error
        self.renders_tools = "tools" in names

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

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolDefinition] = (),
        add_generation_prompt: bool = True,
        thinks: bool | None = None,
    ) -> str:
        """The prompt as text, for display only: in it, forged special tokens look like real ones.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        scene = _Scene(messages, tools, add_generation_prompt, thinks)
        return self._render(scene, scene.contents(), lambda text: text)

    def encode(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolDefinition] = (),
        add_generation_prompt: bool = True,
        thinks: bool | None = None,
    ) -> list[int]:
        """Token ids of the prompt; see the module's docstring.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        scene = _Scene(messages, tools, add_generation_prompt, thinks)
        contents = scene.contents()
        text = self._render(scene, contents, lambda text: text)
        marks = _Marks(f"{secrets.randbits(128):039d}")

        def shielded(text: str) -> str:
            return marks.shield(text, tokenizer.find_special(text))

        try:
            skeleton = self._render(scene, marks.placeholders(contents), shielded)
            parts = split_at(skeleton, tokenizer.find_special(skeleton))
            for restored in (contents, [content.strip() for content in contents]):
                if marks.fill(skeleton, restored) == text:
                    return tokenizer.encode_parts(
                        [p if isinstance(p, int) else marks.fill(p, restored) for p in parts]
                    )
            guarded = [
                marks.guard(content, tokenizer.find_special(content)) for content in contents
            ]
            text = self._render(scene, guarded, shielded)
        except ChatTemplateError as error:
            # Only the marks can be at fault, and they must not show in a message.
            raise ChatTemplateError(UNSAFE) from error
        own = split_at(text, tokenizer.find_special(text))
        if _ids(own) != _ids(parts):
            raise ChatTemplateError(UNSAFE)
        return tokenizer.encode_parts([p if isinstance(p, int) else marks.unguard(p) for p in own])

    def _render(self, scene: "_Scene", contents: Sequence[str], spell: Callable[[str], str]) -> str:
        rows, tools = scene.rows(contents, spell), scene.tools(spell)
        try:
            return self._template.render(
                messages=rows,
                add_generation_prompt=scene.add_generation_prompt,
                tools=tools,
                documents=None,
                strftime_now=scene.strftime_now,
                **scene.options,
                **self.tokens,
            )
        except Exception as error:
            # A template is somebody else's program: whatever it raises is about these messages.
            raise ChatTemplateError(
                f"the chat template of this model refuses the messages: {_one_line(error)}"
            ) from error


class _Scene:
    """What is to be rendered, perhaps several times, each time with its texts spelled otherwise."""

    def __init__(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition],
        add_generation_prompt: bool,
        thinks: bool | None,
    ) -> None:
        self._messages = messages
        self._tools = tools
        self.add_generation_prompt = add_generation_prompt
        # By both names that published templates have for it.
        names = () if thinks is None else ("enable_thinking", "thinking")
        self.options = dict.fromkeys(names, thinks)
        # Of one moment, so that all renderings show the same time.
        self.strftime_now = datetime.datetime.now().strftime

    def contents(self) -> list[str]:
        """The contents of all messages, and then what was thought before them."""
        return [
            *(message.content for message in self._messages),
            *(message.reasoning or "" for message in self._messages),
        ]

    def rows(self, contents: Sequence[str], spell: Callable[[str], str]) -> list[dict[str, object]]:
        """The messages for the template, with these contents.

        Raises:
            ChatTemplateError: no message, or a role that is none.
        """
        if not self._messages:
            raise ChatTemplateError("there must be at least one message")
        rows: list[dict[str, object]] = []
        for index, message in enumerate(self._messages):
            role = ROLE_ALIASES.get(message.role, message.role)
            if role not in ROLES:
                known = ", ".join(sorted(ROLES | ROLE_ALIASES.keys()))
                raise ChatTemplateError(
                    f"[{index}].role must be one of {known}, got {message.role[:40]!r}"
                )
            row: dict[str, object] = {"role": role, "content": contents[index]}
            # Templates ask whether the others are there at all.
            if message.reasoning:
                row["reasoning_content"] = contents[len(self._messages) + index]
            if message.tool_calls:
                row["tool_calls"] = [_spelled(_call_row(c), spell) for c in message.tool_calls]
            if message.tool_call_id is not None:
                row["tool_call_id"] = spell(message.tool_call_id)
            rows.append(row)
        return rows

    def tools(self, spell: Callable[[str], str]) -> list[object] | None:
        return [_spelled(tool, spell) for tool in self._tools] or None


def _call_row(call: MessageCall) -> dict[str, object]:
    """A call for the template, which wants the arguments as an object."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.arguments  # a call that was cut off
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _spelled(value: object, spell: Callable[[str], str], depth: int = 0) -> object:
    """The value with all its strings, keys included, spelled otherwise."""
    if depth > MAX_DEPTH:
        raise ChatTemplateError("a tool or the arguments of a call are nested too deeply")
    if isinstance(value, str):
        return spell(value)
    if isinstance(value, Mapping):
        return {spell(k): _spelled(v, spell, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item, spell, depth + 1) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class _Marks:
    """Strings put into message contents to find them again in the rendered text.

    Attributes:
        nonce: unguessable, so that no content can pose as a mark; digits only, so that it survives
            a change of case.
    """

    nonce: str

    @property
    def _break(self) -> str:
        """What separates the characters of a special token; no beginning of a placeholder."""
        return f"{self.nonce}0"

    def placeholders(self, contents: Sequence[str]) -> list[str]:
        """What to render in place of each content."""
        # White space forges nothing, and templates ask whether there is anything else.
        return [
            f"{self.nonce}.{index}." if content.strip() else content
            for index, content in enumerate(contents)
        ]

    def fill(self, text: str, contents: Sequence[str]) -> str:
        """The text with contents in place of their placeholders, and without breaks."""
        pattern = rf"{self.nonce}(?:\.([0-9]+)\.|0)"
        return re.sub(
            pattern, lambda match: contents[int(match[1])] if match[1] is not None else "", text
        )

    def guard(self, content: str, special: Sequence[tuple[int, int, int]]) -> str:
        """Break every special token found in a content, after its first character."""
        pieces = []
        position = 0
        for start, _, _ in special:
            pieces += [content[position : start + 1], self._break]
            position = start + 1
        return "".join([*pieces, content[position:]])

    def shield(self, text: str, special: Sequence[tuple[int, int, int]]) -> str:
        """Break a string also where it may begin a special token that ends behind it."""
        broken = self.guard(text, special)
        return TOKEN_BEGINNINGS.sub(lambda match: match[0] + self._break, broken)

    def unguard(self, text: str) -> str:
        return text.replace(self._break, "")


def _ids(parts: Sequence[str | int]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]


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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: not escaped for HTML, characters as they are.

    The parameters are those that templates may give, in their order.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MAX_MESSAGE_CHARS]
