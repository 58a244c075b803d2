import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat_template import ChatTemplate
from gateway.tokenizer import Tokenizer
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    U64,
    GGUFBytes,
    array_entry,
    entry,
    small_llama,
    string,
    tensor_info,
)
from golden_model import TINY_GGUF_ARCHITECTURES, default_model_files, tiny_gguf_files
from jaxengine.errors import ModelError
from jaxengine.weights.checkpoint import open_checkpoint
from jaxengine.weights.gguf import GGUFFile
from jaxengine.weights.source import ModelFiles


def read(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content.build() if isinstance(content, GGUFBytes) else content)
    return GGUFFile(path)


def plain(contents):
    return contents.tolist() if isinstance(contents, np.ndarray) else contents


@pytest.mark.parametrize("architecture", TINY_GGUF_ARCHITECTURES)
def test_everything_equals_what_the_gguf_package_reads(architecture):
    path = tiny_gguf_files(architecture).path
    ours, oracle = GGUFFile(path), gguf.GGUFReader(path)
    expected = {
        key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")
    }
    assert {key: plain(value) for key, value in ours.metadata.items()} == expected
    assert ours.tensor_names == tuple(tensor.name for tensor in oracle.tensors)
    for tensor in oracle.tensors:
        # The package, too, gives arrays outermost dimension first.
        np.testing.assert_array_equal(ours.tensor(tensor.name), tensor.data)
        assert ours.tensor_shape(tensor.name) == tensor.data.shape


def test_metadata_values_keep_their_types(tmp_path):
    file = read(
        tmp_path,
        GGUFBytes(
            entries=[
                entry("flag", BOOL, True),
                entry("number", U32, 7),
                entry("real", F32, 0.5),
                entry("text", STRING, "naïve 日本"),
                array_entry("words", STRING, ["a", "", "ü"]),
                array_entry("numbers", I32, [1, -2]),
                array_entry("flags", BOOL, [True, False]),
            ]
        ),
    )
    values = {key: plain(value) for key, value in file.metadata.items()}
    assert values == {
        "flag": True,
        "number": 7,
        "real": 0.5,
        "text": "naïve 日本",
        "words": ["a", "", "ü"],
        "numbers": [1, -2],
        "flags": [True, False],
    }
    assert values["flag"] is True


def test_a_matrix_is_out_by_in(tmp_path):
    content = GGUFBytes()
    content.add_f32("w", np.arange(6).reshape(2, 3))
    assert read(tmp_path, content).tensor("w").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_data_starts_at_the_alignment_of_the_file(tmp_path):
    info = tensor_info("w", [1], 0, 0)
    head = GGUFBytes(entries=[entry("general.alignment", U32, 256)], infos=[info]).build()
    assert len(head) < 256
    content = head.ljust(256, b"\0") + struct.pack("<f", 2.5)
    assert read(tmp_path, content).tensor("w").tolist() == [2.5]


def test_an_unknown_tensor_name_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="has no tensor 'nope'"):
        read(tmp_path, GGUFBytes()).tensor("nope")


HUGE = 2**63
BAD_FILES = {
    "empty": (b"", "cannot read"),
    "other magic": (GGUFBytes(magic=b"GGML"), "is not a GGUF file"),
    "old version": (GGUFBytes(version=1), "version 1 is not supported"),
    "big endian": (GGUFBytes(version=3 << 24), "version 50331648 is not supported"),
    "huge tensor count": (GGUFBytes(num_tensors=HUGE), f"{HUGE} tensors cannot fit"),
    "huge entry count": (GGUFBytes(num_entries=HUGE), f"{HUGE} metadata entries cannot fit"),
    "more entries than there are": (GGUFBytes(num_entries=1, data=b"\xff" * 64), "well-formed"),
    "huge string": (
        GGUFBytes(entries=[struct.pack("<Q", HUGE) + bytes(64)]),
        "inside a field",
    ),
    "huge string array": (
        GGUFBytes(entries=[array_entry("a", STRING, [], count=HUGE)], data=bytes(64)),
        f"{HUGE} strings in 'a' cannot fit",
    ),
    "huge number array": (
        # 2^61 elements of 8 bytes overflow 64 bits to zero.
        GGUFBytes(entries=[array_entry("a", U64, [], count=2**61)], data=bytes(64)),
        f"{2**61} elements in 'a' cannot fit",
    ),
    "nested array": (GGUFBytes(entries=[array_entry("a", ARRAY, [])]), "unsupported type 9"),
    "unknown value type": (
        GGUFBytes(entries=[string("a") + struct.pack("<I", 99) + bytes(8)]),
        "unsupported type 99",
    ),
    "key not UTF-8": (GGUFBytes(entries=[entry(b"\xff", U32, 1)]), "metadata key is not UTF-8"),
    "value not UTF-8": (GGUFBytes(entries=[entry("a", STRING, b"\xc3")]), "a is not UTF-8"),
    "long key": (GGUFBytes(entries=[entry("k" * 65_536, U32, 1)]), "has 65536 characters"),
    "key twice": (GGUFBytes(entries=[entry("a", U32, 1)] * 2), "key 'a' appears twice"),
    "zero alignment": (
        GGUFBytes(entries=[entry("general.alignment", U32, 0)]),
        "general.alignment is 0",
    ),
    "odd alignment": (
        GGUFBytes(entries=[entry("general.alignment", U32, 48)]),
        "general.alignment is 48",
    ),
    "text as alignment": (
        GGUFBytes(entries=[entry("general.alignment", STRING, "32")]),
        "general.alignment is '32'",
    ),
    "tensor twice": (
        GGUFBytes(infos=[tensor_info("w", [1], 0, 0)] * 2, data=bytes(64)),
        "tensor 'w' appears twice",
    ),
    "no dimension": (
        GGUFBytes(infos=[tensor_info("w", [], 0, 0)], data=bytes(64)),
        "has 0 dimensions",
    ),
    "many dimensions": (
        GGUFBytes(infos=[tensor_info("w", [1], 0, 0, dims=2**32 - 1)], data=bytes(64)),
        "has 4294967295 dimensions",
    ),
    "zero size": (
        GGUFBytes(infos=[tensor_info("w", [4, 0], 0, 0)], data=bytes(64)),
        r"has sizes \[4, 0\]",
    ),
    "product overflows 64 bits": (
        GGUFBytes(infos=[tensor_info("w", [2**32, 2**32], 0, 0)], data=bytes(64)),
        "after the end",
    ),
    "row is no whole number of blocks": (
        GGUFBytes(infos=[tensor_info("w", [33], 8, 0)], data=bytes(64)),
        r"type Q8_0 has sizes \[33\]",
    ),
    "unknown tensor type": (
        GGUFBytes(infos=[tensor_info("w", [32], 77, 0)], data=bytes(64)),
        "has type 77; supported are F32",
    ),
    "offset beyond the file": (
        GGUFBytes(infos=[tensor_info("w", [4], 0, 2**40)], data=bytes(64)),
        "after the end",
    ),
    "offset overflows": (
        GGUFBytes(infos=[tensor_info("w", [4], 0, 2**64 - 32)], data=bytes(64)),
        "after the end",
    ),
    "unaligned offset": (
        GGUFBytes(infos=[tensor_info("w", [4], 0, 4)], data=bytes(64)),
        "unaligned offset 4",
    ),
    "last byte missing": (
        GGUFBytes(infos=[tensor_info("w", [4], 0, 0)], data=bytes(15)),
        "after the end",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_malformed_file_is_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(ModelError, match=message) as error:
        read(tmp_path, content)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        GGUFFile(tmp_path / "none.gguf")


def test_a_truncated_file_is_refused(tmp_path):
    whole = small_llama().build()
    for size in range(0, len(whole), 7):
        with pytest.raises(ModelError):
            read(tmp_path, whole[:size])


WHOLE = small_llama().build()
EDGES = st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff" * 4, struct.pack("<Q", 2**61)])


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8) | EDGES),
        min_size=1,
        max_size=4,
    ),
    size=st.integers(len(WHOLE) // 2, len(WHOLE)) | st.just(len(WHOLE)),
)
def test_a_damaged_file_raises_nothing_but_model_errors(tmp_path_factory, edits, size):
    damaged = bytearray(WHOLE)
    for position, replacement in edits:
        damaged[position : position + len(replacement)] = replacement
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(damaged[:size])
    files = ModelFiles("damaged", path, "gguf")
    messages = []
    for use in (use_weights, use_tokenizer, ChatTemplate.from_model):
        try:
            use(files)
        except ModelError as error:
            messages.append(str(error))
    assert all(len(message.splitlines()) == 1 for message in messages)


def use_weights(files):
    checkpoint = open_checkpoint(files)
    for name in checkpoint.names():
        checkpoint.get(name)


def use_tokenizer(files):
    tokenizer = Tokenizer.from_model(files)
    tokenizer.decode(tokenizer.encode("abc </s>", parse_special=True, add_bos=True))
    tokenizer.token_bytes(3)


@pytest.mark.model
def test_the_default_model_has_the_tensors_that_it_is_known_to_have():
    file = GGUFFile(default_model_files().path)
    assert len(file.tensor_names) == 272
    assert file.tensor_shape("token_embd.weight") == (49_152, 576)
    assert file.metadata["llama.block_count"] == 30
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48_900
