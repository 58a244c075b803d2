import pytest

from bench.simulation.record import GapHistogram, ReplicaRecord


def test_percentiles_of_gaps_are_within_half_a_percent():
    gaps = GapHistogram()
    for number in range(1, 1001):
        gaps.add(number / 1000, 1)
    found = gaps.distribution()
    assert found is not None
    assert found.mean == pytest.approx(500.5)
    assert found.p50 == pytest.approx(500, rel=0.006)
    assert found.p90 == pytest.approx(900, rel=0.006)
    assert found.p99 == pytest.approx(990, rel=0.006)
    assert found.max == 1000


def test_a_gap_counts_as_often_as_it_is_said_to():
    gaps = GapHistogram()
    gaps.add(0.01, 98)
    gaps.add(1.0, 2)
    found = gaps.distribution()
    assert found is not None
    assert found.mean == pytest.approx((98 * 10 + 2 * 1000) / 100)
    assert found.p50 == pytest.approx(10, rel=0.006)
    assert found.p99 == pytest.approx(1000, rel=0.006)


def test_no_gap_has_no_distribution():
    assert GapHistogram().distribution() is None


def test_records_are_added_up():
    one, two = ReplicaRecord(), ReplicaRecord()
    for record, seconds in ((one, 1.0), (two, 3.0)):
        record.index.append(int(seconds))
        record.gaps.add(seconds, 1)
        record.end_s = 10 * seconds
        record.count_step(
            duration_s=seconds,
            num_seqs=2,
            num_tokens=5,
            num_slots=8,
            kv_use=seconds / 4,
            num_preempted=1,
        )
    whole = ReplicaRecord.merged([one, two])
    assert list(whole.index) == [1, 3]
    assert (whole.num_steps, whole.num_tokens, whole.num_slots) == (2, 10, 16)
    assert (whole.wasted_slots, whole.num_preemptions) == (6, 2)
    assert whole.busy_s == 4.0
    assert whole.seq_s == 2 * 1 + 2 * 3
    assert whole.kv_use_s == 0.25 * 1 + 0.75 * 3
    assert whole.kv_use_max == 0.75
    assert whole.end_s == 30.0
    gaps = whole.gaps.distribution()
    assert gaps is not None
    assert gaps.mean == 2000
