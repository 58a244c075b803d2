import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gateway.tokenizer import Tokenizer, split_at
from gateway.tokenizer_files import TokenizerFiles
from golden_model import (
    GOLDEN_DIR,
    TINY_GGUF_ARCHITECTURES,
    default_model_files,
    tiny_gguf_files,
    tiny_model_files,
)
from jaxengine.errors import ModelError

IM_START, IM_END, ENDOFTEXT, PAD = range(256, 260)
GOLDEN_ROWS = json.loads((GOLDEN_DIR / "tokenization_smollm2.json").read_text())["rows"]
# The golden ids come from transformers' GGUF loader, which drops the pre-tokenizer "smollm". In the
# published tokenizer, as in llama.cpp, every number character stands alone, so this text differs.
NUMBER_SIGNS = "٣٤٥ ۱۲۳ ⅷ ½"


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.from_model(tiny_model_files("llama"))


@pytest.fixture(scope="module")
def smollm2():
    return Tokenizer.from_model(default_model_files())


def wrap(backend, *, bos_id=None, adds_bos=False):
    return Tokenizer(TokenizerFiles(backend=backend, bos_id=bos_id, eos_ids=(), adds_bos=adds_bos))


def joined(tokenizer, ids):
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids)


@pytest.mark.parametrize(
    "files", [tiny_model_files("llama"), *map(tiny_gguf_files, TINY_GGUF_ARCHITECTURES)]
)
def test_a_byte_level_tokenizer_gives_the_bytes(files):
    tokenizer = Tokenizer.from_model(files)
    text = "Hi, 日本 12\n\t é 👩‍👧"
    ids = tokenizer.encode(text)
    # qwen2 composes characters first; this text is composed already.
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 260
    assert tokenizer.bos_id == IM_START
    assert tokenizer.eos_ids[0] == IM_END


def test_special_tokens_are_parsed_only_on_request(tiny):
    text = "a<|im_end|><|im_start|>b"
    assert tiny.encode(text) == list(text.encode())
    assert tiny.encode(text, parse_special=True) == [97, IM_END, IM_START, 98]
    assert tiny.find_special(text) == [(1, 11, IM_END), (11, 23, IM_START)]


def test_special_tokens_are_hidden_in_answers_unless_asked_for(tiny):
    ids = [104, IM_END, 105]
    assert tiny.decode(ids) == "hi"
    assert tiny.decode(ids, skip_special=False) == "h<|im_end|>i"
    assert joined(tiny, ids) == b"hi"
    assert [tiny.is_special(token_id) for token_id in (*ids, 260, -1)] == [False, True] + 3 * [
        False
    ]


def test_ids_beyond_the_vocabulary_are_nothing(tiny):
    assert tiny.token_bytes(260) == tiny.token_bytes(-1) == tiny.token_bytes(2**70) == b""
    assert tiny.decode([-1, 104, 260, 2**70]) == "h"


def test_the_first_token_of_a_text_is_added_once(tiny):
    assert tiny.adds_bos is False
    assert tiny.encode("a", add_bos=True) == [IM_START, 97]
    assert tiny.encode("<|im_start|>a", parse_special=True, add_bos=True) == [IM_START, 97]
    assert tiny.encode("", add_bos=True) == [IM_START]


def test_lone_surrogates_become_replacement_characters(tiny):
    assert tiny.decode(tiny.encode("a\ud800b")).strip("\ufffd") == "a\ufffd\ufffd\ufffdb"


def test_the_longer_of_two_special_tokens_is_meant():
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<e>", "<e>a"])
    assert wrap(backend).find_special("<e>a<e>") == [(0, 4, 2), (4, 7, 1)]


def test_split_at_keeps_every_character_outside_special_tokens():
    assert split_at("xAByzA", [(1, 2, 7), (2, 3, 8), (5, 6, 7)]) == ["x", 7, 8, "yz", 7]
    assert split_at("xy", []) == ["xy"]
    assert split_at("", []) == []


def test_white_space_beside_a_special_token_goes_where_the_token_says():
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "Ġ": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken("<both>", lstrip=True, rstrip=True, special=True, normalized=False),
            AddedToken("<none>", special=True, normalized=False),
        ]
    )
    text = "a <both> b <none> a"
    expected = backend.encode(text, add_special_tokens=False).ids
    assert wrap(backend).encode(text, parse_special=True) == expected == [0, 3, 1, 2, 4, 2, 0]


def test_an_added_token_that_is_not_special_is_text():
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = wrap(backend)
    assert tokenizer.encode("a<think>a") == [0, 1, 0]
    assert tokenizer.token_bytes(1) == b"<think>"
    assert not tokenizer.is_special(1)
    # Outside the byte alphabet a token is written as it is.
    backend.add_tokens([AddedToken("日 本", special=False, normalized=False)])
    assert wrap(backend).token_bytes(2) == "日 本".encode()


SENTENCEPIECE_WORDS = ["▁", "▁a", "▁b", "a", "b", "▁ab", "ab"]


def sentencepiece(scheme):
    """A tokenizer like Llama 2's: spaces as a symbol, unknown characters as bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *SENTENCEPIECE_WORDS]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize(
    "text", ["ab a", " ab", "<s>ab</s> a<s>", "<s> a b", "", "日a\n", "b</s>ab"]
)
def test_a_sentencepiece_like_text_gets_the_ids_that_the_library_gives(scheme, text):
    expected = sentencepiece(scheme).encode(text, add_special_tokens=False).ids
    tokenizer = wrap(sentencepiece(scheme), bos_id=1)
    assert tokenizer.encode(text, parse_special=True) == expected
    assert tokenizer.decode(expected) == sentencepiece(scheme).decode(expected)


def test_sentencepiece_like_tokens_are_words_with_spaces_and_single_bytes():
    tokenizer = wrap(sentencepiece("first"))
    ids = tokenizer.encode("ab 日</s>")
    assert joined(tokenizer, ids) == " ab 日</s>".encode()
    assert tokenizer.token_bytes(3 + 0xE6) == b"\xe6"
    assert tokenizer.token_bytes(2) == b""
    # The library's decoder takes the space of the start away, and only that.
    assert tokenizer.decode(ids) == "ab 日</s>"


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused():
    backend = Backend(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decodes with WordPiece; supported are byte-level"):
        wrap(backend)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40) | st.text("<|im_endstarofx>", max_size=60))
def test_no_text_becomes_a_special_token(text):
    tokenizer = Tokenizer.from_model(tiny_model_files("llama"))
    ids = tokenizer.encode(text)
    assert not any(map(tokenizer.is_special, ids))
    assert joined(tokenizer, ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_threads_may_share_a_tokenizer(tiny):
    texts = [f"text {number} <|im_end|>" * 20 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(tiny.encode, texts))
    assert encoded == [list(text.encode()) for text in texts]


@pytest.mark.model
@pytest.mark.parametrize("row", GOLDEN_ROWS, ids=range(len(GOLDEN_ROWS)))
def test_the_default_model_tokenizes_as_hugging_face_does(smollm2, row):
    if row["text"] != NUMBER_SIGNS:
        assert smollm2.encode(row["text"], parse_special=True) == row["ids"]
    assert smollm2.decode(row["ids"], skip_special=False) == row["decoded"]
    plain = [token_id for token_id in row["ids"] if not smollm2.is_special(token_id)]
    assert joined(smollm2, plain).decode() == smollm2.decode(row["ids"])


@pytest.mark.model
def test_number_characters_of_any_script_stand_alone(smollm2):
    by_hand = [token_id for sign in NUMBER_SIGNS for token_id in smollm2.encode(sign)]
    assert smollm2.encode(NUMBER_SIGNS) == by_hand


@pytest.mark.model
def test_the_default_model_has_its_known_special_tokens(smollm2):
    assert smollm2.vocab_size == 49_152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == (2,)
    assert smollm2.adds_bos is False
    assert [token_id for token_id in range(100) if smollm2.is_special(token_id)] == list(range(17))
    assert smollm2.encode("hi<|im_end|>", parse_special=True) == [6004, 2]
    assert 2 not in smollm2.encode("hi<|im_end|>")


@pytest.mark.model
def test_bytes_of_random_tokens_decode_as_the_library_decodes_them(smollm2):
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(17, 49_152) for _ in range(12)]
        assert joined(smollm2, ids).decode("utf-8", "replace") == smollm2.decode(ids)
