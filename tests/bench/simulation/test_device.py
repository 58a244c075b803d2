from dataclasses import replace

import pytest

from bench.simulation.device import H200, MODELS, FixedDevice, RooflineDevice, StepLoad

# At the vendor's peaks, without overhead: what pencil and paper give.
IDEAL = replace(
    H200,
    bandwidth_efficiency=1.0,
    flops_efficiency=1.0,
    link_efficiency=1.0,
    link_latency_s=0.0,
    overhead_s=0.0,
)
ONE_DECODE = StepLoad(
    num_slots=1, decode_only=True, num_seqs=1, decode_context=1, prefill_context=0
)


@pytest.mark.parametrize(
    ("size", "num_parameters"), [("0.6b", 0.596e9), ("8b", 8.03e9), ("70b", 70.55e9)]
)
def test_the_shapes_have_as_many_parameters_as_their_model_cards_say(size, num_parameters):
    assert MODELS[size].num_parameters == pytest.approx(num_parameters, rel=0.002)


def test_a_token_of_8b_takes_128_kib_of_kv():
    # K and V, 32 layers, 8 heads of 128, 2 bytes each.
    assert MODELS["8b"].kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131072


def test_one_decode_of_8b_takes_the_time_to_read_its_weights():
    # 8.03e9 parameters less the embedding, of which only a row is read: 15.0 GB at 4.8 TB/s.
    step_s = RooflineDevice(model=MODELS["8b"], accelerator=IDEAL).step_s(ONE_DECODE)
    assert step_s == pytest.approx(15.0e9 / 4.8e12, rel=0.005)


def test_a_long_context_adds_its_kv_to_what_is_read():
    device = RooflineDevice(model=MODELS["8b"], accelerator=IDEAL)
    longer = ONE_DECODE._replace(decode_context=100_001)
    # 100,000 tokens of 131,072 bytes at 4.8 TB/s.
    assert device.step_s(longer) - device.step_s(ONE_DECODE) == pytest.approx(2.7307e-3, rel=1e-4)


def test_a_large_prompt_takes_the_time_to_multiply():
    # 2 operations for each of 6.98e9 parameters and 8192 tokens, 1 row of the vocabulary's
    # 0.525e9, and attention: 4 * 32 layers * 4096 * (8192 * 8193 / 2) operations.
    load = StepLoad(
        num_slots=8192,
        decode_only=False,
        num_seqs=1,
        decode_context=0,
        prefill_context=8192 * 8193 // 2,
    )
    operations = 2 * 6.979e9 * 8192 + 2 * 0.525e9 + 4 * 32 * 4096 * 8192 * 8193 / 2
    step_s = RooflineDevice(model=MODELS["8b"], accelerator=IDEAL).step_s(load)
    assert step_s == pytest.approx(operations / 989e12, rel=0.001)


def test_tensor_parallelism_divides_the_reading_and_adds_all_reduces():
    device = RooflineDevice(model=MODELS["70b"], accelerator=IDEAL, num_chips=8)
    # 69.5e9 parameters read, 139 GB over 8 chips; 160 all-reduces of 16 KiB, 7/8 of it twice.
    reading_s = 139.0e9 / 8 / 4.8e12
    reducing_s = 160 * 2 * 7 / 8 * 16384 / 450e9
    assert device.step_s(ONE_DECODE) == pytest.approx(reading_s + reducing_s, rel=0.002)


def test_every_all_reduce_costs_its_latency_however_small():
    slow = replace(IDEAL, link_latency_s=1e-3)
    ideal_s, slow_s = (
        RooflineDevice(model=MODELS["70b"], accelerator=chip, num_chips=4).all_reduce_s(1)
        for chip in (IDEAL, slow)
    )
    assert slow_s - ideal_s == pytest.approx(160e-3)


def test_efficiency_and_overhead_make_a_step_longer():
    real = replace(IDEAL, bandwidth_efficiency=0.5, overhead_s=1e-3)
    ideal_s, real_s = (
        RooflineDevice(model=MODELS["8b"], accelerator=chip).step_s(ONE_DECODE)
        for chip in (IDEAL, real)
    )
    assert real_s == pytest.approx(2 * ideal_s + 1e-3)


def test_what_the_weights_leave_of_the_memory_holds_kv():
    # (141 GB * 0.9 - 16.06 GB) / 131,072 bytes
    assert RooflineDevice(model=MODELS["8b"]).kv_capacity_tokens == pytest.approx(845_600, rel=1e-3)


def test_70b_does_not_fit_on_one_chip():
    with pytest.raises(ValueError, match="leaves no room for KV on 1 H200"):
        RooflineDevice(model=MODELS["70b"])


def test_an_odd_number_of_chips_is_refused():
    with pytest.raises(ValueError, match="num_chips"):
        RooflineDevice(model=MODELS["8b"], num_chips=3)


def test_a_fixed_device_takes_the_same_time_for_every_step():
    device = FixedDevice(seconds=0.25)
    assert device.step_s(ONE_DECODE) == 0.25
    assert device.step_s(ONE_DECODE._replace(num_slots=4096)) == 0.25
