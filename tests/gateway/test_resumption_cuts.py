"""Whatever is lost between two messages, and wherever: the text is the same.

Cuts in the middle of a message are in tests/clients/test_client_resume.py, behind a real proxy.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import EOS, FakeEngine
from gateway.connections import STREAM_CONNECTIONS
from stream_app import RawStream, serve_streams, start, until

TEXT = "Grüße, 世界! 😀 fine"

CUTS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps of the engine whose messages arrive
        st.integers(0, 3),  # steps whose messages are lost on the way
        st.integers(0, 6),  # steps while nobody is there
    ),
    max_size=8,
)


def produced(engine: FakeEngine) -> str:
    """Return the whole characters that the engine has made so far."""
    return TEXT.encode()[: engine.generation_tokens].decode(errors="ignore")


class Reader:
    """A client that knows what it has, and reads only what must come."""

    def __init__(self):
        self.text, self.ids, self.logprobs, self.seq, self.done = "", [], [], -1, None

    async def read_up_to_date(self, stream: RawStream, engine: FakeEngine) -> None:
        while self.done is None and (self.text != produced(engine) or engine.num_active == 0):
            message = await stream.receive()
            if message["type"] == "done":
                self.done = message
            else:
                assert message["seq"] > self.seq
                self.seq = message["seq"]
                self.text += message["text"]
                self.ids += message["token_ids"]
                self.logprobs += [entry["logprob"] for entry in message["logprobs"]]

    def state(self):
        return self.text, list(self.ids), list(self.logprobs), self.seq, self.done


@settings(max_examples=30, deadline=None)
@given(cuts=CUTS, encoding=st.sampled_from(["json", "msgpack"]))
async def test_the_text_is_the_same_wherever_the_socket_is_cut(cuts, encoding):
    engine = FakeEngine()
    engine.script_all(TEXT)
    engine.hold()
    reader, token = Reader(), ""
    async with serve_streams(engine) as gateway:
        for num_taken, num_lost, num_alone in [*cuts, (len(TEXT.encode()) + 1, 0, 0)]:
            async with gateway.connect(encoding) as stream:
                if token == "":
                    await stream.send(
                        {
                            **start("a", max_tokens=100, logprobs=0),
                            "return_token_ids": True,
                            "stream": {"resumable": True},
                        }
                    )
                    token = (await stream.receive())["resume_token"]
                else:
                    resume = {"type": "resume", "id": "a", "token": token, "after": reader.seq}
                    await stream.send(resume)
                    assert (await stream.receive())["type"] == "resumed"
                    await reader.read_up_to_date(stream, engine)
                for _ in range(num_taken):
                    engine.step()
                    await reader.read_up_to_date(stream, engine)
                arrived = reader.state()
                for _ in range(num_lost):
                    engine.step()
                    await reader.read_up_to_date(stream, engine)
                reader.text, reader.ids, reader.logprobs, reader.seq, reader.done = arrived
                stream.ws._response.connection.transport.abort()
                await until(lambda: not gateway.app[STREAM_CONNECTIONS])
            engine.step(num_alone)
            if reader.done is not None:
                break
        engine.release()
    assert reader.text == TEXT
    assert reader.ids == [*TEXT.encode(), EOS]
    assert reader.logprobs == [-token_id / 1000 for token_id in reader.ids]
    assert reader.done["seq"] == reader.seq + 1
    assert reader.done["usage"]["completion_tokens"] == len(TEXT.encode()) + 1  # and the end
