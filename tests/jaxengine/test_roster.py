"""Who waits and who runs; what they make of it together is tested with the scheduler."""

import pytest

from engine_loop import small_config
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason
from jaxengine.request import Request, RequestStatus
from jaxengine.roster import Roster
from jaxengine.sampling_params import SamplingParams
from jaxengine.step_draft import StepDraft


class Rosters:
    """A roster of four rows and ten blocks of eight tokens."""

    def __init__(self, **changes):
        config = small_config(num_blocks=11, **changes)
        self.kv = KVCacheManager(num_blocks=11, block_size=8, enable_prefix_caching=True)
        self.roster = Roster(config, self.kv, eos_token_ids=(), batch=None)

    def add(self, name, prompt, *, tenant=""):
        request = Request(
            name,
            tuple(prompt),
            SamplingParams(max_tokens=4),
            seed=0,
            arrival_time_s=0.0,
            tenant=tenant,
        )
        self.roster.add(request)
        return request

    def admit(self, request, **options):
        lacking = self.roster.admit(StepDraft(64), request, 1.0, **options)
        self.roster.check_integrity()
        return lacking


def test_a_request_waits_runs_and_gives_everything_back():
    its = Rosters()
    request = its.add("a", range(12))
    assert its.roster.find("a") is request
    assert (len(its.roster.waiting), len(its.roster.running)) == (1, 0)
    assert its.admit(request) == ""
    assert (len(its.roster.waiting), list(its.roster.running)) == (0, [request])
    assert (its.roster.num_admitted, its.roster.tokens_admitted) == (1, 12)
    assert len(request.block_ids) == 2
    output = its.roster.end(request, FinishReason.ABORT, 2.0)
    assert output.finish_reason is FinishReason.ABORT
    assert (len(its.roster), its.roster.find("a")) == (0, None)
    assert its.kv.num_free_blocks == 10
    its.roster.check_integrity()


def test_a_row_is_owed_to_who_has_fewer_than_its_share_while_others_have_more():
    its = Rosters()
    for index in range(4):
        assert its.admit(its.add(f"flood-{index}", (index, 1), tenant="flood")) == ""
    assert its.roster.is_owed_row(its.add("light", (9, 9), tenant="light"))
    assert not its.roster.is_owed_row(its.add("more", (9, 8), tenant="flood"))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_no_row_is_owed_to_a_tenant_where_there_are_none(policy):
    its = Rosters(scheduling_policy=policy)
    for index in range(4):
        its.admit(its.add(f"flood-{index}", (index, 1), tenant="flood"))
    assert not its.roster.is_owed_row(its.add("light", (9, 9), tenant="light"))


def test_blocks_that_are_of_no_use_are_counted_as_taken():
    its = Rosters()
    request = its.add("a", range(24))  # three blocks of ten
    assert its.roster.has_blocks_for(request, besides=7)
    assert not its.roster.has_blocks_for(request, besides=8)


def test_what_is_still_to_be_written_is_no_prefix_and_nobodys_block():
    its = Rosters()
    first = its.add("first", range(20))
    assert its.admit(first) == ""
    its.kv.remember(first, 20)
    unfinished = {*first.block_ids, 10}
    assert its.admit(second := its.add("second", range(20)), unfinished=unfinished) == ""
    assert second.num_computed_tokens == 0
    assert not set(second.block_ids) & unfinished
    # Once it is written, two blocks of eight are shared.
    assert its.admit(third := its.add("third", range(20))) == ""
    assert (third.num_computed_tokens, third.block_ids[:2]) == (16, first.block_ids[:2])


def test_who_is_preempted_waits_again_and_is_counted():
    its = Rosters()
    request = its.add("a", range(12))
    its.admit(request)
    its.roster.preempt(request)
    assert request.status is RequestStatus.PREEMPTED
    assert (its.roster.num_preempted, its.roster.num_preemptions) == (1, 1)
    assert (request.block_ids, list(its.roster.waiting)) == ([], [request])
    its.roster.check_integrity()
    assert its.admit(request) == ""
    assert (its.roster.num_preempted, its.roster.num_admitted) == (0, 1)
