import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxengine.errors import ModelError
from jaxengine.weights.safetensors import SafetensorsDirectory


def write_index(directory, weight_map):
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_tensor_keeps_its_values_and_its_type(tmp_path, dtype):
    weight = np.array([[0.5, -2.0, 3.0], [1.0, 0.0, 448.0]], dtype)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    tensors = SafetensorsDirectory(tmp_path)
    assert tensors.names() == {"w"}
    assert tensors.get("w").dtype == weight.dtype
    np.testing.assert_array_equal(tensors.get("w"), weight)


def test_shards_are_one_model(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "part-1.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, tmp_path / "part-2.safetensors")
    write_index(tmp_path, {"a": "part-1.safetensors", "b": "part-2.safetensors"})
    tensors = SafetensorsDirectory(tmp_path)
    assert tensors.names() == {"a", "b"}
    assert tensors.get("a").tolist() == [1, 1]
    assert tensors.get("b").tolist() == [0, 0, 0]


def test_an_unknown_name_is_an_error(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no tensor 'b'"):
        SafetensorsDirectory(tmp_path).get("b")


def test_integers_are_no_weights(tmp_path):
    save_file({"a": np.ones(2, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="type I8; supported are F32"):
        SafetensorsDirectory(tmp_path).get("a")


def test_several_files_without_an_index_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"holds 0 \.safetensors files"):
        SafetensorsDirectory(tmp_path)
    for name in ("a", "b"):
        save_file({name: np.ones(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"holds 2 \.safetensors files"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../secret.safetensors"}, "names the shard '../secret.safetensors'"),
        ({"a": "/etc/passwd"}, "names the shard '/etc/passwd'"),
        ({"a": 3}, "names the shard 3"),
        ({"a": "gone.safetensors"}, "cannot read .*gone.safetensors"),
        ({"c": "part.safetensors"}, "lacks the tensor 'c'"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, weight_map, message):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "part.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelError, match=message):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        struct.pack("<Q", 2) + b"{}x",
        struct.pack("<Q", 62)
        + b'{"a":{"dtype":"F32","shape":[4294967296,4],"data_offsets":[0,0]}}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot read"):
        SafetensorsDirectory(tmp_path)
