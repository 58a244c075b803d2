"""One generation of the stream protocol, from its `start` to its last message.

It puts what it has to say into its mailbox and knows nothing of connections, so it can outlive
the one that it began on.
"""

import asyncio
import logging
from collections.abc import Sequence

from msgspec import UNSET

from gateway.callers import Caller
from gateway.config import GatewayConfig
from gateway.delta_reader import DeltaReader
from gateway.errors import GatewayError, InternalError, ModelNotFound, Overloaded
from gateway.generation import TextDelta, TextFinish, TextGenerator, TextStream, Timing, Usage
from gateway.mailbox import Mailbox
from gateway.messages import Accepted, Done, Error, Start, generation_request
from gateway.token_logprobs import TokenLogprob, token_logprob

__all__ = ["StreamRun"]

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 4 * 1024 * 1024  # with log-probabilities; text alone is bounded by the context

_NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)


class StreamRun:
    """A generation and its end; whoever makes it also runs `run` as a task, and sets `task`.

    Args:
        mailbox: gets `accepted`, deltas, and exactly one last message.
        caller: who is asking.
        resume_token: what `accepted` tells, None for a stream that cannot be resumed.
    """

    def __init__(
        self,
        start: Start,
        mailbox: Mailbox,
        generator: TextGenerator,
        config: GatewayConfig,
        *,
        caller: Caller,
        resume_token: str | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.task: asyncio.Task[None] | None = None
        self._start = start
        self._generator = generator
        self._config = config
        self._caller = caller
        self._resume_token = resume_token
        self._started_s = asyncio.get_running_loop().time()
        self._is_cancelled = False  # the client asked for it
        self._output: TextStream | None = None  # None until the engine has the request
        self._finish: TextFinish | None = None

    @property
    def request_id(self) -> str:
        """The engine's name for the request; "" until it has one."""
        return "" if self._output is None else self._output.request_id

    async def run(self) -> None:
        """Generate, and end with a last message unless the task is cancelled."""
        try:
            last = await self._run_to_the_end()
        except GatewayError as error:
            last = Error.of(error, self._start.id)
        except Exception:
            logger.exception("a stream failed")
            last = Error.of(InternalError(), self._start.id)
        self.mailbox.put_last(last)

    def cancel(self) -> None:
        """End the generation because the client wants it, with the usage so far. Idempotent.

        What is there of the answer is sent whatever the credits: the client will grant no more.
        """
        if self._output is not None:
            self._output.cancel()
        elif not self._is_cancelled and self.task is not None:
            self.task.cancel()
            self.mailbox.put_last(self._done_before_the_engine())
        self._is_cancelled = True
        self.mailbox.lift_limit()

    def abandon(self) -> None:
        """End the generation because nobody wants it; no message comes of it."""
        if self.task is not None:
            self.task.cancel()

    async def _run_to_the_end(self) -> Done | Error:
        request = self._start.request
        if request.model is not None and request.model not in self._config.served_model_names:
            raise ModelNotFound(request.model)
        prepared = await self._generator.prepare(generation_request(request, caller=self._caller))
        async with self._generator.start(prepared) as output:
            self._output = output
            self.mailbox.put_first(
                Accepted(
                    id=self._start.id,
                    request_id=output.request_id,
                    prompt_tokens=len(prepared.prompt_token_ids),
                    resume_token=UNSET if self._resume_token is None else self._resume_token,
                )
            )
            await DeltaReader([output], self._put).read()
        assert self._finish is not None, "the reader reads to the end"
        return self._last_message(self._finish)

    def _put(self, _index: int, delta: TextDelta) -> bool:
        """Hand on what is new; who wants much and takes nothing ends the generation."""
        self._finish = delta.finish
        logprobs: Sequence[TokenLogprob] = ()
        if delta.logprobs:
            logprobs = [
                token_logprob(self._generator.tokenizer, token_id, found)
                for token_id, found in zip(delta.token_ids, delta.logprobs, strict=False)
            ]
        self.mailbox.put_delta(delta.text, delta.token_ids, logprobs)
        if logprobs and self.mailbox.buffer.num_unsent_bytes > MAX_UNSENT_BYTES:
            raise Overloaded(
                f"log-probabilities of {MAX_UNSENT_BYTES} bytes wait to be fetched",
                retry_after_s=1.0,
                code="too_much_unsent",
            )
        return True

    def _last_message(self, finish: TextFinish) -> Done | Error:
        if (failure := self._generator.failure(finish)) is not None:
            return Error.of(failure, self._start.id)
        return Done(
            id=self._start.id,
            seq=0,  # the mailbox knows
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            usage=finish.usage,
            timing=finish.timing,
        )

    def _done_before_the_engine(self) -> Done:
        elapsed_s = asyncio.get_running_loop().time() - self._started_s
        return Done(
            id=self._start.id,
            seq=0,
            finish_reason="cancelled",
            stop_reason=None,
            usage=_NO_USAGE,
            timing=Timing(
                queue_s=0.0,
                ttft_s=None,
                prefill_s=0.0,
                decode_s=0.0,
                e2e_s=round(elapsed_s, 6),
                itl_mean_s=None,
                itl_p50_s=None,
                itl_p99_s=None,
                itl_max_s=None,
                num_preemptions=0,
            ),
        )
