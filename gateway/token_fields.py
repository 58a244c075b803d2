"""Fields about single tokens that requests of every wire format have, and what they ask for."""

from collections.abc import Mapping, Sequence

import msgspec
import orjson

from gateway.errors import InvalidRequest
from gateway.grammars import Structure
from gateway.token_wishes import TokenWishes

__all__ = [
    "ANY_OBJECT",
    "StructuralTag",
    "StructuredOutputs",
    "TokenFields",
    "json_structure",
    "structures_of",
    "tag_structure",
]

ANY_OBJECT = '{"type":"object"}'
MAX_CHOICES = 1024
MAX_TAGS = 128

PREFIX = "structured_outputs."


class StructuralTag(msgspec.Struct, frozen=True):
    """A part that may stand in running text: between its marks, JSON that matches a schema."""

    begin: str
    end: str
    schema: dict[str, object] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer must look like, in vLLM's words: one of these."""

    json: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, object] | None = None


class TokenFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields; ranges are checked where requests of every wire format are prepared."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None

    def wishes(
        self,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        structures: Sequence[Structure] = (),
    ) -> TokenWishes:
        """Return what is asked for, together with what other fields ask for.

        Raises:
            InvalidRequest: more than one structure, one that is none, or a bias of no token.
        """
        found = [*structures, *_of_structured_outputs(self.structured_outputs)]
        if len(found) > 1:
            first, second = found[0].param, found[1].param
            raise InvalidRequest(f"{first} and {second} exclude each other", param=second)
        penalty = self.repetition_penalty
        return TokenWishes(
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if penalty is None else penalty,
            logit_bias=_logit_bias(self.logit_bias or {}),
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=tuple(self.allowed_token_ids) if self.allowed_token_ids else None,
            structure=found[0] if found else None,
        )


def structures_of(
    prefix: str,
    *,
    json: str | dict[str, object] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[Structure]:
    """Return what these fields ask for; their names begin with the prefix.

    Raises:
        InvalidRequest: one that is no structure.
    """
    found = []
    if json is not None:
        found.append(json_structure(json, f"{prefix}json"))
    if regex is not None:
        found.append(Structure(kind="regex", text=regex, param=f"{prefix}regex"))
    if choice is not None:
        param = f"{prefix}choice"
        if not 0 < len(choice) <= MAX_CHOICES or not all(choice):
            raise InvalidRequest(
                f"{param} must hold 1 to {MAX_CHOICES} texts, none of them empty", param=param
            )
        found.append(Structure(kind="choice", text=orjson.dumps(choice).decode(), param=param))
    if grammar is not None:
        found.append(Structure(kind="grammar", text=grammar, param=f"{prefix}grammar"))
    return found


def json_structure(schema: str | dict[str, object], param: str) -> Structure:
    """Return the structure of a schema, which may come as text.

    Raises:
        InvalidRequest: it is no JSON object, or nested too deeply.
    """
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except ValueError as exc:
            raise InvalidRequest(f"{param} is not valid JSON", param=param) from exc
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    try:
        text = orjson.dumps(schema).decode()
    except (TypeError, ValueError) as exc:  # it reads deeper nesting than it writes
        raise InvalidRequest(f"{param} cannot be read: {exc}", param=param) from exc
    return Structure(kind="json_schema", text=text, param=param)


def tag_structure(
    tags: Sequence[StructuralTag] | None, triggers: Sequence[str] | None, param: str
) -> Structure:
    """Return the structure of a text with such parts; where a trigger stands, one begins.

    Raises:
        InvalidRequest: none or too many, or one that begins with no trigger.
    """
    if not tags or not triggers or not all(triggers):
        raise InvalidRequest(
            f"{param} needs structures and triggers, none of them empty", param=param
        )
    if max(len(tags), len(triggers)) > MAX_TAGS:
        raise InvalidRequest(
            f"{param} may hold at most {MAX_TAGS} structures and triggers", param=param
        )
    parts = []
    for place, tag in enumerate(tags):
        # The first trigger that a text has come to counts, which is the shortest.
        trigger = min((t for t in triggers if tag.begin.startswith(t)), key=len, default=None)
        if trigger is None:
            field = f"{param}.structures[{place}].begin"
            raise InvalidRequest(f"{field} begins with none of the triggers", param=field)
        parts.append({"trigger": trigger, **msgspec.structs.asdict(tag)})
    try:
        text = orjson.dumps(parts).decode()
    except (TypeError, ValueError) as exc:
        raise InvalidRequest(f"{param} cannot be read: {exc}", param=param) from exc
    return Structure(kind="structural_tag", text=text, param=param)


class _StructuralTags(msgspec.Struct, frozen=True):
    structures: list[StructuralTag]
    triggers: list[str]


def _of_structural_tag(wanted: str | dict[str, object], param: str) -> Structure:
    """Return the structure of tags that come as an object, or as its text."""
    try:
        tags = msgspec.convert(
            orjson.loads(wanted) if isinstance(wanted, str) else wanted, _StructuralTags
        )
    except ValueError as exc:  # of either library
        raise InvalidRequest(
            f"{param} must be an object with structures and triggers: {exc}", param=param
        ) from exc
    return tag_structure(tags.structures, tags.triggers, param)


def _of_structured_outputs(wanted: StructuredOutputs | None) -> list[Structure]:
    if wanted is None:
        return []
    found = structures_of(
        PREFIX,
        json=wanted.json,
        regex=wanted.regex,
        choice=wanted.choice,
        grammar=wanted.grammar,
    )
    if wanted.json_object:
        param = f"{PREFIX}json_object"
        found.append(Structure(kind="json_schema", text=ANY_OBJECT, param=param))
    if wanted.structural_tag is not None:
        found.append(_of_structural_tag(wanted.structural_tag, f"{PREFIX}structural_tag"))
    return found


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return biases by token id; JSON has only text for keys."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(
                f"logit_bias: '{key[:40]}' is not a token id", param=f"logit_bias.{key[:40]}"
            )
    # "7" and "07" are the same token: the last one counts, as with keys that are equal.
    return tuple({int(key): bias for key, bias in biases.items()}.items())
