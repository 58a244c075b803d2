from jaxengine.outputs import FinishReason, RequestOutput, RequestTiming

TIMING = RequestTiming(
    queue_s=1.0,
    prefill_s=2.0,
    decode_s=3.0,
    ttft_s=3.0,
    e2e_s=6.0,
    num_cached_tokens=16,
    num_preemptions=2,
)


def make_output(*token_ids: int, **fields) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        new_token_ids=token_ids,
        new_token_times_s=tuple(float(token_id) for token_id in token_ids),
        **fields,
    )


def test_an_output_is_the_last_if_it_has_a_finish_reason():
    assert not make_output(1).finished
    assert all(make_output(finish_reason=reason).finished for reason in FinishReason)


def test_finish_reasons_are_spelt_as_on_the_wire():
    reasons = [str(reason) for reason in FinishReason]
    assert reasons == [
        *("stop", "length", "abort", "error", "queue_timeout", "deadline", "dead_end"),
    ]


def test_merging_joins_tokens_and_their_times_in_order():
    merged = make_output(1, 2).merged(make_output(3))
    assert merged == make_output(1, 2, 3)


def test_merging_keeps_how_it_ended():
    last = make_output(
        7,
        num_cached_tokens=16,
        queue_s=1.0,
        num_preemptions=2,
        finish_reason=FinishReason.STOP,
        stop_token_id=7,
        timing=TIMING,
    )
    merged = make_output(5, 6, num_cached_tokens=16, queue_s=1.0).merged(last)
    assert merged.new_token_ids == (5, 6, 7)
    assert merged.finished
    assert (merged.stop_token_id, merged.timing) == (7, TIMING)
    assert (merged.num_cached_tokens, merged.queue_s, merged.num_preemptions) == (16, 1.0, 2)


def test_merging_keeps_the_error():
    last = make_output(finish_reason=FinishReason.ERROR, error="it broke")
    merged = make_output(5).merged(last)
    assert (merged.new_token_ids, merged.error) == ((5,), "it broke")


def test_merging_in_either_grouping_is_the_same():
    a, b, c = make_output(1), make_output(2, num_preemptions=1), make_output(3, num_preemptions=1)
    assert a.merged(b).merged(c) == a.merged(b.merged(c))
