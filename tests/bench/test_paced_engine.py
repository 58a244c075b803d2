from bench.paced_engine import paced_engine
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_engine import TokenRequest


async def test_every_stream_gets_a_token_per_step_to_its_length():
    engine = paced_engine(num_streams=3, prompt_len=4, output_len=5, vocab_size=300, step_s=0.0001)
    engine.start()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    request = TokenRequest(prompt_token_ids=[1, 2, 3, 4], params=params)
    ids = []
    for stream in engine.submit([request] * 3):
        async with stream:
            ids.append([token async for output in stream for token in output.new_token_ids])
    assert [len(tokens) for tokens in ids] == [5, 5, 5]
    assert all(256 <= token < 300 for tokens in ids for token in tokens)
    await engine.stop(drain_timeout_s=0)
    # All three start with the first step, unless it was on its way before they had all come.
    assert engine.stats().num_steps <= 5 + 2 + 1
