"""Fields of the OpenAI API, and common extensions, that we know but do not support yet.

Ignoring one that asks for something would answer a different question than the one asked; so a
request that uses it is refused, and one that carries its neutral value passes.
"""

from collections.abc import Mapping

from gateway.errors import InvalidRequest

__all__ = ["CHAT_FIELDS", "COMMON_FIELDS", "COMPLETION_FIELDS", "refuse_unsupported"]

# Field -> values that ask for nothing. Null always does.
COMMON_FIELDS: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

COMPLETION_FIELDS: Mapping[str, tuple[object, ...]] = {
    **COMMON_FIELDS,
    "suffix": ("",),
}

CHAT_FIELDS: Mapping[str, tuple[object, ...]] = {
    **COMMON_FIELDS,
    "echo": (False,),
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}


def refuse_unsupported(
    body: Mapping[str, object], fields: Mapping[str, tuple[object, ...]]
) -> None:
    """Check the fields of a decoded body.

    Raises:
        InvalidRequest: naming the first field that asks for something we cannot do.
    """
    for name, neutral in fields.items():
        value = body.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            raise InvalidRequest(
                f"{name} is not supported yet", param=name, code="unsupported_parameter"
            )


def _same(value: object, other: object) -> bool:
    """Equal, where JSON's true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
