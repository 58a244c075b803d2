"""Fields of the OpenAI API, and common extensions, that we know but do not support yet.

Ignoring one that asks for something would answer a different question than the one asked; so a
request that uses it is refused, and one that carries its neutral value passes.
"""

from collections.abc import Mapping

from gateway.errors import InvalidRequest

__all__ = ["CHAT_FIELDS", "COMPLETION_FIELDS", "refuse_unsupported"]

# Field -> values that ask for nothing. Null always does.
_COMMON: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

COMPLETION_FIELDS: Mapping[str, tuple[object, ...]] = {
    **_COMMON,
    "logprobs": (),
    "suffix": ("",),
}

CHAT_FIELDS: Mapping[str, tuple[object, ...]] = {
    **_COMMON,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "top_logprobs": (0,),
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
