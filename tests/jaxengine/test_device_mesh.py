"""A model that several devices share, against Hugging Face and against itself."""

import json
import math

import jax
import numpy as np
import pytest

from engine_builder import HF_CONFIG, RandomCheckpoint
from golden_model import GOLDEN_DIR, TINY_DIR
from jaxengine.device_mesh import DeviceMesh, open_mesh
from many_devices import run_on_devices

# All runs of a number of devices are in one process.
pytestmark = pytest.mark.timeout(600)

# On two devices and on four: with two kv heads, with one, with biases, norms of heads, a table of
# its own for the output; with the kernel that a server here would take, and with the reference.
ON_TWO = ("tiny_answers,llama,auto", "tiny_answers,qwen3,reference")
ON_FOUR = ("tiny_answers,qwen2,reference", "tiny_answers,mistral,auto")


@pytest.fixture(scope="module")
def two():
    return run_on_devices(2, *ON_TWO, "programs,reference", "second_start", "built", "sums")


@pytest.fixture(scope="module")
def four():
    return run_on_devices(4, *ON_FOUR, "neighbours", "programs,auto", "sums")


def greedy(call):
    golden = np.load(TINY_DIR / call.split(",")[1] / "golden.npz")
    return [golden[f"greedy_{name}"].tolist() for name in "01"]


@pytest.mark.parametrize("call", ON_TWO)
def test_two_devices_give_the_answers_of_hugging_face(two, call):
    assert two[call] == greedy(call)


@pytest.mark.parametrize("call", ON_FOUR)
def test_four_devices_that_share_kv_heads_give_the_answers_of_hugging_face(four, call):
    assert four[call] == greedy(call)


@pytest.mark.model
def test_three_devices_give_the_golden_answers_of_the_default_model():
    text = (GOLDEN_DIR / "golden_smollm2.json").read_text(encoding="utf-8")
    [answers] = run_on_devices(3, "golden_answers").values()
    assert answers == [case["output_ids"] for case in json.loads(text)["cases"]]


def test_neighbours_and_chunks_change_no_bit(four):
    run = four["neighbours"]
    assert len(set(run["alone"])) == 8
    assert run["answers"].keys() == {"together", "chunks of 16", "preempted", "reset"}
    for way, answers in run["answers"].items():
        assert answers == run["alone"], way
    assert run["compiles_after_ready"] == 0


def test_what_the_shards_have_is_added_up_in_their_order(two, four):
    assert two["sums"]
    assert four["sums"]


def test_each_device_has_the_cache_of_its_own_heads(two):
    run = two["programs,reference"]
    # Two layers of 2,000 blocks; two of four kv heads, padded to 64 elements.
    assert run["cache_shape"] == [4000, 2, 2, 16, 64]
    assert run["cache_bytes"] == math.prod(run["cache_shape"]) * 2
    assert run["devices"] == [0, 1]


def test_the_cache_is_updated_in_place_and_goes_nowhere(two, four):
    for run in (two["programs,reference"], four["programs,auto"]):
        ways = [run["programs"][kind] for kind in run["programs"].keys() - {"choice"}]
        assert ways
        for program in ways:
            assert program["of_the_cache"] == []
            assert program["aliased_bytes"] >= run["cache_bytes"]
            assert program["temporary_bytes"] < run["cache_bytes"] / 4


def test_devices_exchange_two_sums_a_layer_the_embeddings_and_the_logits(two, four):
    twos, fours = two["programs,reference"], four["programs,auto"]
    assert collectives(twos, "decode") == {"all-reduce": 2 * 2 + 1}
    # Mixed steps may have to tell the log-probabilities of prompts.
    assert collectives(twos, "mixed") == {"all-reduce": 2 * 2 + 1, "all-gather": 1}
    # Among four, the sum has an order: each device adds up a part, and hands it to the others.
    num_sums = 2 * fours["layers_in_text"]
    ordered = {"all-to-all": num_sums, "all-reduce": 1, "all-gather": num_sums + 1}
    assert collectives(fours, "mixed") == ordered
    # Once more for those who want to know the model's own logits, beside what biases made of them.
    assert collectives(twos, "choice") == collectives(fours, "choice") == {"all-gather": 2}


def collectives(run, name):
    return run["programs"][name]["collectives"]


def test_a_second_start_finds_the_programs_of_all_devices(two):
    first, second = two["second_start"]
    assert first == second
    assert len(first) == 5


def test_an_engine_counts_the_memory_of_one_device(two):
    facts, shapes = two["built"], RandomCheckpoint(num_hidden_layers=1).shapes
    norms = [shape for name, shape in shapes.items() if len(shape) == 1]
    num_shared = sum(math.prod(shape) for shape in shapes.values())
    num_same = sum(math.prod(shape) for shape in norms)
    assert facts["weights"] == ((num_shared - num_same) / 2 + num_same) * 4
    # 21 blocks of K and V of 16 tokens in one layer, one of the two heads, padded to 64 elements.
    assert facts["kv_cache"] == 21 * 2 * 16 * 64 * 4
    assert facts["vocab_size"] == HF_CONFIG["vocab_size"]
    assert facts["heads"] == [4, 2]


def test_a_state_is_described_as_it_would_be_allocated(two):
    assert two["built"]["is_described"]


def test_more_devices_than_there_are_are_refused_and_said_how_to_try():
    number = len(jax.devices()) + 1
    with pytest.raises(ValueError, match=f"tensor_parallel_size {number} needs as many devices"):
        open_mesh(number)
    with pytest.raises(ValueError, match=f"xla_force_host_platform_device_count={number}"):
        open_mesh(number)


def test_processes_of_which_some_would_have_no_device_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [object()] * 4)
    with pytest.raises(ValueError, match="tensor_parallel_size must be 4, the devices of all 2"):
        open_mesh(2)


def test_a_single_device_runs_a_step_as_it_is():
    def step():
        raise NotImplementedError

    mesh, array, shape = DeviceMesh(jax.devices()[:1]), np.zeros(7), jax.ShapeDtypeStruct((7,), int)
    assert mesh.spread_forward(step) is mesh.spread_choose(step) is step
    assert mesh.replicate(array) is array
    assert mesh.describe(shape) is shape
    assert mesh.weights_sharding is None
