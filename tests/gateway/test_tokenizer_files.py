import json
import shutil

import pytest

from gateway.tokenizer import Tokenizer
from gateway.tokenizer_files import load_tokenizer_files, token_text
from gguf_bytes import BOOL, I32, STRING, U32, array_entry, entry, small_llama, string
from golden_model import TINY_DIR
from jaxengine.errors import ModelError
from jaxengine.weights.source import ModelFiles


@pytest.fixture
def directory(tmp_path):
    """A copy of a tiny model's tokenizer that a test may change."""
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_DIR / "llama" / file, tmp_path / file)
    return tmp_path


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def load(directory):
    return load_tokenizer_files(ModelFiles("x", directory, "safetensors"))


def gguf_files(tmp_path, *entries):
    """A small model whose metadata has these entries in place of its own."""
    content = small_llama()
    for raw in entries:
        key = raw[: 8 + int.from_bytes(raw[:8], "little")]
        content.entries = [kept for kept in content.entries if not kept.startswith(key)]
        content.entries.append(raw)
    path = tmp_path / "model.gguf"
    path.write_bytes(content.build())
    return ModelFiles("x", path, "gguf")


def test_end_tokens_come_from_both_files_of_a_directory(directory):
    assert load(directory).eos_ids == (257, 258)
    change(directory / "generation_config.json", eos_token_id=258)
    assert load(directory).eos_ids == (258, 257)
    change(directory / "generation_config.json", eos_token_id=[99_999, -1, True, "x", 258])
    assert load(directory).eos_ids == (258, 257)
    (directory / "generation_config.json").unlink()
    assert load(directory).eos_ids == (257,)
    (directory / "tokenizer_config.json").unlink()
    assert load(directory).eos_ids == ()


def test_the_first_token_comes_from_either_file(directory):
    assert load(directory).bos_id == 256
    change(directory / "tokenizer_config.json", bos_token={"content": "<|endoftext|>"})
    assert load(directory).bos_id == 258
    change(directory / "tokenizer_config.json", bos_token=None)
    assert load(directory).bos_id == 256
    change(directory / "generation_config.json", bos_token_id=-1)
    assert load(directory).bos_id is None


def test_a_prompt_begins_with_the_first_token_if_config_or_post_processor_say_so(directory):
    assert load(directory).adds_bos is False
    change(directory / "tokenizer_config.json", add_bos_token=True)
    assert load(directory).adds_bos is True
    change(directory / "tokenizer_config.json", bos_token=None)
    change(directory / "generation_config.json", bos_token_id=None)
    assert load(directory).adds_bos is False
    change(directory / "tokenizer_config.json", add_bos_token=None, bos_token="<|im_start|>")
    assert load(directory).adds_bos is False
    change(
        directory / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {
                "<|im_start|>": {"id": "<|im_start|>", "ids": [256], "tokens": ["<|im_start|>"]}
            },
        },
    )
    files = load(directory)
    assert files.adds_bos is True
    # Only on request: the post-processor itself is never run on prompts.
    assert Tokenizer(files).encode("a") == [97]


def test_truncation_and_padding_of_the_file_are_ignored(directory):
    change(
        directory / "tokenizer.json",
        truncation={
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 259,
            "pad_type_id": 0,
            "pad_token": "<|pad|>",
        },
    )
    assert Tokenizer(load(directory)).encode("abc") == [97, 98, 99]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_damaged_tokenizer_json_is_refused(directory, content):
    (directory / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        load(directory)


def test_token_text_reads_strings_and_objects():
    assert token_text("</s>") == token_text({"content": "</s>"}) == "</s>"
    assert token_text(None) is token_text({}) is token_text(3) is None


def test_gguf_fields_make_a_tokenizer(tmp_path):
    files = load_tokenizer_files(gguf_files(tmp_path))
    assert files.bos_id == 0
    assert files.eos_ids == (1, 2)
    assert files.adds_bos is True
    tokenizer = Tokenizer(files)
    assert tokenizer.encode("abc") == [6, 5]
    assert tokenizer.encode("a</s>", parse_special=True) == [3, 1]
    assert tokenizer.is_special(2)


def test_gguf_token_kinds_decide_what_is_special(tmp_path):
    # 2 unknown, 3 control, 4 user defined, 5 unused.
    kinds = [2, 3, 3, 1, 1, 1, 1, 4, 1, 1, 1, 5]
    tokenizer = Tokenizer.from_model(
        gguf_files(tmp_path, array_entry("tokenizer.ggml.token_type", I32, kinds))
    )
    assert [tokenizer.is_special(token_id) for token_id in range(8)] == [True] * 3 + [False] * 5
    assert tokenizer.token_bytes(7) == b"d"
    # The last id only pads the table.
    assert tokenizer.vocab_size == 11


def test_a_token_listed_twice_keeps_its_first_id(tmp_path):
    tokens = ["<s>", "</s>", "</s>", "a", "b", "c", "ab", "a", "e", "f", "g", "h"]
    tokenizer = Tokenizer.from_model(
        gguf_files(tmp_path, array_entry("tokenizer.ggml.tokens", STRING, tokens))
    )
    assert tokenizer.encode("a</s>", parse_special=True) == [3, 1]
    assert tokenizer.token_bytes(2) == tokenizer.token_bytes(7) == b""


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll 123 4", ["I", "'ll", " 123", " 4"]),
        ("smollm", "I'll 123 4", ["I", "'ll", " ", "1", "2", "3", " ", "4"]),
        ("qwen2", "I'LL 123 4\n\n x", ["I", "'LL", " ", "1", "2", "3", " ", "4", "\n\n", " x"]),
        ("llama-bpe", "I'LL 12345\n", ["I", "'LL", " ", "123", "45", "\n"]),
    ],
)
def test_text_is_cut_into_words_as_the_name_says(tmp_path, pre, text, words):
    files = load_tokenizer_files(gguf_files(tmp_path, entry("tokenizer.ggml.pre", STRING, pre)))
    cut = files.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def test_qwen2_composes_characters_first(tmp_path):
    files = load_tokenizer_files(gguf_files(tmp_path, entry("tokenizer.ggml.pre", STRING, "qwen2")))
    assert files.backend.normalizer.normalize_str("e\u0301") == "\u00e9"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (entry("tokenizer.ggml.model", STRING, "llama"), "kind 'llama'; only byte-level BPE"),
        (entry("tokenizer.ggml.pre", STRING, "tekken"), "pre-tokenizer 'tekken'; supported are"),
        (entry("tokenizer.ggml.tokens", STRING, "abc"), "tokens must be a list of strings"),
        (array_entry("tokenizer.ggml.merges", I32, [1]), "merges must be a list of strings"),
        (array_entry("tokenizer.ggml.merges", STRING, ["ab"]), "malformed merge 'ab'"),
        (array_entry("tokenizer.ggml.merges", STRING, ["a x"]), "inconsistent tokenizer"),
        (array_entry("tokenizer.ggml.token_type", I32, [1]), "one token type for each token"),
        (entry("tokenizer.ggml.token_type", U32, 1), "one token type for each token"),
        (entry("tokenizer.ggml.bos_token_id", U32, 12), "bos_token_id is 12, which is no token"),
        (entry("tokenizer.ggml.eos_token_id", BOOL, True), "eos_token_id is True, which is no"),
    ],
)
def test_gguf_fields_that_make_no_sense_are_refused(tmp_path, raw, message):
    with pytest.raises(ModelError, match=message):
        load_tokenizer_files(gguf_files(tmp_path, raw))


def test_gguf_without_merges_or_kinds_has_plain_tokens(tmp_path):
    content = small_llama()
    for key in ("tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        content.entries = [raw for raw in content.entries if not raw.startswith(string(key))]
    path = tmp_path / "model.gguf"
    path.write_bytes(content.build())
    tokenizer = Tokenizer.from_model(ModelFiles("x", path, "gguf"))
    assert tokenizer.encode("ab") == [3, 4]
    assert not tokenizer.is_special(0)
