"""Tokenizers out of model files: tokenizer.json, or the fields of a GGUF file.

Either way the result is a `tokenizers.Tokenizer` plus what the model's own files say about where
texts begin and end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxengine.errors import ModelError
from jaxengine.weights.gguf import GGUFFile, MetadataValue
from jaxengine.weights.hf_config import read_json_object
from jaxengine.weights.source import ModelFiles

__all__ = ["TokenizerFiles", "load_tokenizer_files", "token_text"]

# GGML's kinds of tokens.
KIND_NORMAL, KIND_UNKNOWN, KIND_CONTROL, KIND_USER_DEFINED, KIND_UNUSED = 1, 2, 3, 4, 5

# What GPT-4-like pre-tokenizers split into, but for the number of digits that stay together.
WORDS_BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
WORDS_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """A tokenizer as its model's files describe it.

    Attributes:
        backend: encodes and decodes; special tokens are known to it.
        bos_id: the token that begins a text, if there is one.
        eos_ids: every token that ends an answer.
        adds_bos: whether a prompt begins with `bos_id`.
    """

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool


def load_tokenizer_files(files: ModelFiles) -> TokenizerFiles:
    """Read the tokenizer of a model.

    Raises:
        ModelError: it is missing, damaged, or of a kind that headrace does not know.
    """
    if files.kind == "gguf":
        return _from_gguf(GGUFFile(files.path))
    return _from_directory(files.path)


def token_text(value: object) -> str | None:
    """The text of a token in tokenizer_config.json, where it is a string or an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _from_directory(directory: Path) -> TokenizerFiles:
    path = directory / "tokenizer.json"
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"cannot read {path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _optional_json(directory / "tokenizer_config.json")
    generation = _optional_json(directory / "generation_config.json")
    bos_id = _known_id(backend, config.get("bos_token"))
    bos = generation.get("bos_token_id")
    if bos_id is None and _is_token_id(bos, backend):
        bos_id = bos
    # Chat models name one end token here and further ones there; each of them ends an answer.
    eos = generation.get("eos_token_id")
    eos_ids = list(eos) if isinstance(eos, list) else [eos]
    eos_id = _known_id(backend, config.get("eos_token"))
    if eos_id is not None:
        eos_ids.append(eos_id)
    adds_bos = config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        # Without that setting the post-processor decides.
        adds_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    return TokenizerFiles(
        backend=backend,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if _is_token_id(i, backend))),
        adds_bos=adds_bos and bos_id is not None,
    )


def _optional_json(path: Path) -> Mapping[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _known_id(backend: Backend, token: object) -> int | None:
    text = token_text(token)
    return None if text is None else backend.token_to_id(text)


def _is_token_id(value: object, backend: Backend) -> TypeGuard[int]:
    # Not isinstance: true and false are no ids.
    return type(value) is int and 0 <= value < 2**32 and backend.id_to_token(value) is not None


def _from_gguf(file: GGUFFile) -> TokenizerFiles:
    metadata = file.metadata
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"{file.path} has a tokenizer of the kind {model!r:.80}; only byte-level BPE ('gpt2') "
            "is supported in GGUF files"
        )
    tokens = _string_list(file, "tokenizer.ggml.tokens")
    merges = [_merge(file, line) for line in _string_list(file, "tokenizer.ggml.merges")]
    kinds = _token_kinds(file, len(tokens))
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    # A token listed twice keeps its first id. Unused ids only pad the table to a round size.
    vocab: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != KIND_UNUSED:
            vocab.setdefault(token, token_id)
    try:
        # Llama 3's table holds words that its merges do not reach; it looks those up first.
        backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file.path} has an inconsistent tokenizer: {error}") from error
    _set_pre_tokenizer(backend, pre, file)
    backend.decoder = decoders.ByteLevel()
    # Deduplicated, because the library appends an id for a token that it has seen already.
    by_kind = {token: kinds[token_id] for token, token_id in vocab.items() if token}
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in by_kind.items()
            if kind in (KIND_CONTROL, KIND_UNKNOWN)
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in by_kind.items()
            if kind == KIND_USER_DEFINED
        ]
    )
    bos_id = _gguf_token_id(file, "bos", len(tokens))
    eos_ids = (_gguf_token_id(file, name, len(tokens)) for name in ("eos", "eot", "eom"))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    return TokenizerFiles(
        backend=backend,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        adds_bos=bool(adds_bos) and bos_id is not None,
    )


def _set_pre_tokenizer(backend: Backend, pre: MetadataValue, file: GGUFFile) -> None:
    """Set how text is cut into words, by llama.cpp's name of it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        backend.pre_tokenizer = byte_level
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre == "qwen2":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _split_words(r"\p{N}")
    elif pre == "llama-bpe":
        backend.pre_tokenizer = _split_words(r"\p{N}{1,3}")
    else:
        raise ModelError(
            f"{file.path} has the pre-tokenizer {pre!r:.80}; supported are gpt-2, smollm, qwen2 "
            "and llama-bpe"
        )


def _split_words(digits: str) -> pre_tokenizers.Sequence:
    pattern = Regex(f"{WORDS_BEFORE_DIGITS}{digits}{WORDS_AFTER_DIGITS}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _string_list(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key, [])
    if not isinstance(value, list):
        raise ModelError(f"{file.path}: the metadata {key} must be a list of strings")
    return value


def _token_kinds(file: GGUFFile, num_tokens: int) -> list[int]:
    value = file.metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [KIND_NORMAL] * num_tokens
    if isinstance(value, (bool, int, float, str, list)) or len(value) != num_tokens:
        raise ModelError(f"{file.path} does not list one token type for each token")
    kinds: list[int] = value.tolist()
    return kinds


def _merge(file: GGUFFile, line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise ModelError(f"{file.path} has the malformed merge {line!r:.80}")
    return left, right


def _gguf_token_id(file: GGUFFile, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < num_tokens:
        raise ModelError(f"{file.path}: the metadata {key} is {value!r:.80}, which is no token")
    return value
