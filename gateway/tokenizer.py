"""Text to token ids and back.

Special tokens are recognised here, not in the library, so that every caller says for each piece of
text whether it may contain any: a user's words never do.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import orjson
from tokenizers import Tokenizer as Backend

from gateway.tokenizer_files import TokenizerFiles, load_tokenizer_files
from jaxengine.errors import ModelError
from jaxengine.weights.source import ModelFiles

__all__ = ["Tokenizer", "split_at"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_SYMBOL = "\u2581"  # how sentencepiece writes a space


class Tokenizer:
    """The tokenizer of one model. Nothing changes after construction, so threads may share it.

    Attributes:
        vocab_size: one more than the largest id that stands for text; the model's table may be
            longer.
        bos_id: the token that begins a text, if there is one.
        eos_ids: every token that ends an answer.
        adds_bos: whether a prompt of this model begins with `bos_id`.

    Raises:
        ModelError: a kind of tokenizer whose tokens cannot be turned into bytes one by one.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.bos_id = files.bos_id
        self.eos_ids = files.eos_ids
        self.adds_bos = files.adds_bos
        self._backend = files.backend
        # From here on the library leaves special tokens in a text alone.
        self._backend.encode_special_tokens = True
        self._continuing_backend = _without_text_start(files.backend)
        special = {i: t for i, t in files.backend.get_added_tokens_decoder().items() if t.special}
        self._special = special
        self._special_ids = {token.content: token_id for token_id, token in special.items()}
        # Longest first: of two tokens that begin alike, the longer one is meant.
        contents = sorted(filter(None, self._special_ids), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._bytes = _bytes_of_tokens(files.backend, special.keys())
        self.vocab_size = len(self._bytes)

    @classmethod
    def from_model(cls, files: ModelFiles) -> "Tokenizer":
        """Read the tokenizer of a model.

        Raises:
            ModelError: it is missing, damaged, or of a kind that headrace does not know.
        """
        return cls(load_tokenizer_files(files))

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text; lone surrogates become replacement characters.
            parse_special: whether "<|im_end|>" and the like in the text mean the token, or those
                characters.
            add_bos: put the token that begins a text in front, unless the text starts with it.
        """
        ids = self.encode_parts(
            split_at(text, self.find_special(text)) if parse_special else [text]
        )
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def find_special(self, text: str) -> list[tuple[int, int, int]]:
        """Return (start, end, token id) of every special token that is spelled out in a text."""
        return [
            (match.start(), match.end(), self._special_ids[match[0]])
            for match in self._special_pattern.finditer(text)
        ]

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Token ids of one text that is given in parts: ids stand for themselves.

        A stretch of text between two ids must be one part, because tokens span its whole length.
        """
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            # Some special tokens swallow the white space beside them.
            if index and self._strips(parts[index - 1], "rstrip"):
                part = part.lstrip()
            if index + 1 < len(parts) and self._strips(parts[index + 1], "lstrip"):
                part = part.rstrip()
            backend = self._continuing_backend if index else self._backend
            text = part.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
            ids.extend(backend.encode(text, add_special_tokens=False).ids)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; ids that are no token are left out."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text, perhaps only a part of a character.

        Empty for special tokens and for ids that are no token. A tokenizer that marks the start of
        a text with a space has that space here, while `decode` drops it.
        """
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def _strips(self, part: str | int, flag: str) -> bool:
        token = self._special.get(part) if isinstance(part, int) else None
        return token is not None and bool(getattr(token, flag))


def split_at(text: str, special: Sequence[tuple[int, int, int]]) -> list[str | int]:
    """Cut a text at the special tokens found in it: plain stretches, and ids between them."""
    parts: list[str | int] = []
    position = 0
    for start, end, token_id in special:
        if start > position:
            parts.append(text[position:start])
        parts.append(token_id)
        position = end
    if position < len(text):
        parts.append(text[position:])
    return parts


def _without_text_start(backend: Backend) -> Backend:
    """A tokenizer for text that follows other text.

    Metaspace with the scheme "first" puts a space in front of what it takes for the start of a
    text. Everywhere else the tokenizer itself will do.
    """
    state = orjson.loads(backend.to_str())
    first = [
        step
        for step in _steps(state["pre_tokenizer"], "pretokenizers")
        if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first"
    ]
    if not first:
        return backend
    for step in first:
        step["prepend_scheme"] = "never"
    continuing = Backend.from_str(orjson.dumps(state).decode())
    continuing.encode_special_tokens = True
    return continuing


def _steps(part: dict[str, object] | None, inner_key: str) -> Iterator[dict[str, object]]:
    """A part of a tokenizer.json, and if it is a sequence, its steps."""
    if part is None:
        return
    yield part
    inner = part.get(inner_key)
    if isinstance(inner, list):
        for step in inner:
            yield from _steps(step, inner_key)


def _bytes_of_tokens(backend: Backend, special_ids: Iterable[int]) -> list[bytes]:
    """Bytes of every token by id; special tokens and gaps have none."""
    decoder = orjson.loads(backend.to_str())["decoder"]
    kinds = {step["type"] for step in _steps(decoder, "decoders")}
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    if "ByteLevel" in kinds:
        byte_of = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
        for token, token_id in vocab.items():
            try:
                table[token_id] = bytes([byte_of[symbol] for symbol in token])
            except KeyError:
                # An added token is written as it is, and may use characters outside that alphabet.
                table[token_id] = token.encode()
    elif kinds & {"ByteFallback", "Metaspace"}:
        for token, token_id in vocab.items():
            match = BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
            text = token.replace(SPACE_SYMBOL, " ")
            table[token_id] = bytes([int(match[1], 16)]) if match else text.encode()
    else:
        raise ModelError(
            f"the tokenizer decodes with {', '.join(sorted(map(str, kinds))) or 'nothing'}; "
            "supported are byte-level and sentencepiece-like tokenizers"
        )
    for token_id in special_ids:
        table[token_id] = b""
    return table


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]
