"""One request from text to text: limits, template, tokens, engine, detokenizer, stop strings.

Everything that speaks a wire format (OpenAI HTTP, SSE, the native websocket) decodes into a
`GenerationRequest` and reads `TextDelta`s; nothing below this module knows a wire format.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.accounts import Account
from gateway.config import GatewayConfig
from gateway.detokenizer import Detokenizer, StopStrings
from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    from_engine_error,
)
from gateway.grammars import GrammarCompiler
from gateway.metrics import Metrics
from gateway.prompts import Prompt, PromptEncoder, context_overflow
from gateway.text_codec import ChatMessage, ChatRenderer, TextTokenizer, ToolDefinition
from gateway.text_stream import FinishReason, TextDelta, TextFinish, TextStream, Usage
from gateway.timing import Timing
from gateway.token_wishes import NO_WISHES, TokenWishes, with_wishes
from jaxengine.errors import EngineError
from jaxengine.output_stream import OutputStream
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_engine import TokenEngine, TokenRequest

__all__ = [
    "ChatMessage",
    "FinishReason",
    "GenerationRequest",
    "PreparedGeneration",
    "TextDelta",
    "TextFinish",
    "TextGenerator",
    "TextStream",
    "Timing",
    "Usage",
]

MAX_CACHE_SALT_LENGTH = 256
MAX_WAIT_S = 86_400.0  # longest queue timeout or deadline: a day
RETRY_AFTER_S = 5.0  # while the engine starts or stops
MAX_RETRY_AFTER_S = 60.0  # what OpenAI's clients heed


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What a client asked for, whatever the wire format.

    Attributes:
        prompt: text, token ids, or chat messages.
        tools: what the model is told that it may call; with chat messages only.
        visible_tokens: special tokens that the answer shows as text.
        thinks: as in ChatRenderer.
        account: who pays; None for nobody.
        max_tokens: None means as many as the context leaves room for.
        stop: stop strings; the text before the first one that appears is the answer.
        tokens: what is wanted of single tokens.
        prompt_only: nothing is wanted but what `tokens` asks about the prompt.
        cache_salt, tenant, priority, queue_timeout_s, deadline_s: as in TokenRequest.
        Others: as in SamplingParams.
    """

    prompt: Prompt
    tools: tuple[ToolDefinition, ...] = ()
    visible_tokens: tuple[str, ...] = ()
    thinks: bool | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    tokens: TokenWishes = NO_WISHES
    prompt_only: bool = False
    cache_salt: str | None = None
    tenant: str = ""
    account: Account | None = None
    priority: int = 0
    queue_timeout_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedGeneration:
    """A request that passed every check, with its prompt as token ids."""

    request: GenerationRequest
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


class TextGenerator:
    """Turns `GenerationRequest`s into `TextStream`s on one engine and one tokenizer.

    Owns: the tokenizer threads; `close` ends them. Never: the engine, which others start and stop.

    Args:
        chat_template: None for a model that only completes text.
        clock: the clock of the engine's token times.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: TextTokenizer,
        chat_template: ChatRenderer | None,
        *,
        config: GatewayConfig,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._config = config
        self.metrics = metrics
        self._clock = clock
        self._grammars = GrammarCompiler(tokenizer, eos_token_ids=engine.limits.eos_token_ids)
        self._encoder = PromptEncoder(
            tokenizer,
            chat_template,
            num_threads=config.tokenizer_threads,
            max_concurrent=config.max_concurrent_prepares,
        )

    def close(self) -> None:
        self._encoder.close()
        self._grammars.close()

    def check_capacity(self, num_requests: int, *, like: GenerationRequest) -> None:
        """Refuse before any work on so many requests that are to be started together.

        Args:
            num_requests: how many.
            like: one of them; all have its tenant and account.

        Raises:
            gateway.errors.GatewayError: Overloaded (429, retry_after_s), Unavailable (503).
        """
        try:
            self._check_capacity(num_requests, like)
        except GatewayError as exc:
            self._count_rejection(exc, like.account)
            raise

    async def prepare(self, request: GenerationRequest) -> PreparedGeneration:
        """Check the limits, render the template, and tokenize, off the event loop.

        Cancelling is safe.

        Raises:
            gateway.errors.GatewayError: InvalidRequest with `param` naming the field, Overloaded
                when too much waits already, Unavailable when the engine takes no requests.
        """
        try:
            return await self._prepare(request)
        except GatewayError as exc:
            self._count_rejection(exc, request.account)
            raise

    def start(self, prepared: PreparedGeneration) -> TextStream:
        """Submit one request to the engine at once; raises as `start_all`."""
        [stream] = self.start_all([prepared])
        return stream

    def start_all(self, prepared: Sequence[PreparedGeneration]) -> list[TextStream]:
        """Submit all of these requests to the engine at once, or none.

        All have one tenant and one account.

        Raises:
            gateway.errors.GatewayError: Overloaded (429, retry_after_s), Unavailable (503),
                InvalidRequest.
        """
        account = prepared[0].request.account
        num_prompt_tokens = sum(len(p.prompt_token_ids) for p in prepared)
        try:
            if account is not None:
                account.begin(len(prepared), prompt_tokens=num_prompt_tokens)
            try:
                all_outputs = self.engine.submit([_token_request(p) for p in prepared])
            except EngineError as exc:
                if account is not None:
                    account.take_back(len(prepared), prompt_tokens=num_prompt_tokens)
                raise from_engine_error(exc) from exc
        except GatewayError as exc:
            self._count_rejection(exc, account)
            raise
        return [
            self._text_stream(p, outputs) for p, outputs in zip(prepared, all_outputs, strict=True)
        ]

    def failure(self, finish: TextFinish) -> GatewayError | None:
        """Return what to tell a client whose generation failed; None if it ended well."""
        match finish.reason:
            case "queue_timeout":
                return Overloaded(
                    "the request waited for as long as its queue timeout allows",
                    # Its own wait is what we know about the length of the queue.
                    retry_after_s=min(finish.timing.queue_s, MAX_RETRY_AFTER_S),
                    code="queue_timeout",
                )
            case "deadline" if finish.usage.completion_tokens == 0:
                return DeadlineExceeded()
            case "error":
                message = finish.error or "the engine failed"
                if self.engine.failure is not None:
                    return Unavailable(message, code="engine_dead")
                if not self.engine.is_ready:
                    return Unavailable(message, code="shutting_down", retry_after_s=RETRY_AFTER_S)
                return InternalError(message)
            case _:
                return None

    def _text_stream(self, prepared: PreparedGeneration, outputs: OutputStream) -> TextStream:
        request = prepared.request
        return TextStream(
            outputs,
            num_prompt_tokens=len(prepared.prompt_token_ids),
            detokenizer=Detokenizer(self._token_bytes(request.visible_tokens)),
            stops=StopStrings(request.stop, include=request.include_stop_str_in_output),
            eos_token_ids=self.engine.limits.eos_token_ids,
            metrics=self.metrics,
            account=request.account,
            clock=self._clock,
            prompt_only=request.prompt_only,
        )

    def _token_bytes(self, visible: tuple[str, ...]) -> Callable[[int], bytes]:
        """What each token adds to an answer that shows these special tokens."""
        token_bytes = self.tokenizer.token_bytes
        shown = {
            token_id: text.encode()
            for text in visible
            for _, _, token_id in self.tokenizer.find_special(text)
        }
        if not shown:
            return token_bytes
        return lambda token_id: shown.get(token_id) or token_bytes(token_id)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt, as `prepare` would make them.

        Raises:
            gateway.errors.GatewayError: as `prepare`.
        """
        return await self._encoder.encode(
            prompt,
            max_tokens=max_tokens,
            bound="are tokenized at a time",
            vocab_size=self.engine.limits.vocab_size,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
        )

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of these ids, special tokens included.

        Raises:
            gateway.errors.GatewayError: as `prepare`.
        """
        return await self._encoder.run(self.tokenizer.decode, token_ids, skip_special=False)

    async def _prepare(self, request: GenerationRequest) -> PreparedGeneration:
        self._check_capacity(1, request)
        limits = self.engine.limits
        self._check_strings(request)
        _check_scheduling(request)
        params = self._sampling_params(request)
        if request.tokens != NO_WISHES:
            params = _engine_checked(
                lambda: with_wishes(
                    params, request.tokens, self.tokenizer, vocab_size=limits.vocab_size
                )
            )
        if request.tokens.structure is not None:
            grammar = await self._grammars.compile(request.tokens.structure)
            params = replace(params, grammar=grammar)
        ids = await self._encoder.encode(
            request.prompt,
            max_tokens=limits.max_model_len - 1,
            bound=f"fit, because the context of {limits.max_model_len} also holds the answer",
            vocab_size=limits.vocab_size,
            tools=request.tools,
            thinks=request.thinks,
        )
        room = limits.max_model_len - len(ids)
        if request.max_tokens is None:
            params = _engine_checked(lambda: replace(params, max_tokens=room))
        elif request.max_tokens > room:
            raise context_overflow(
                f"the prompt has {len(ids)} tokens and max_tokens is {request.max_tokens}, "
                f"together more than the context of {limits.max_model_len}",
                param="max_tokens",
            )
        return PreparedGeneration(request=request, prompt_token_ids=ids, params=params)

    def _check_capacity(self, num_requests: int, like: GenerationRequest) -> None:
        if not self.engine.is_ready:
            raise Unavailable(
                "the engine accepts no requests now", code="not_ready", retry_after_s=RETRY_AFTER_S
            )
        if like.account is not None:
            like.account.check(num_requests)
        _engine_checked(lambda: self.engine.check_capacity(num_requests, tenant=like.tenant))

    def _sampling_params(self, request: GenerationRequest) -> SamplingParams:
        limits = self.engine.limits
        most = limits.max_model_len if request.max_tokens is None else request.max_tokens
        if not all(0 <= i < limits.vocab_size for i in request.stop_token_ids):
            raise InvalidRequest(
                f"stop_token_ids must be from 0 to {limits.vocab_size - 1}",
                param="stop_token_ids",
            )
        return _engine_checked(
            lambda: SamplingParams(
                max_tokens=most,
                min_tokens=request.min_tokens,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                min_p=request.min_p,
                seed=request.seed,
                stop_token_ids=request.stop_token_ids,
                ignore_eos=request.ignore_eos,
            )
        )

    def _check_strings(self, request: GenerationRequest) -> None:
        config = self._config
        if len(request.stop) > config.max_stop_strings:
            raise InvalidRequest(
                f"stop may hold at most {config.max_stop_strings} strings", param="stop"
            )
        if not all(0 < len(stop) <= config.max_stop_string_length for stop in request.stop):
            raise InvalidRequest(
                f"each stop string must have 1 to {config.max_stop_string_length} characters",
                param="stop",
            )
        if request.cache_salt is not None and len(request.cache_salt) > MAX_CACHE_SALT_LENGTH:
            raise InvalidRequest(
                f"cache_salt may have at most {MAX_CACHE_SALT_LENGTH} characters",
                param="cache_salt",
            )

    def _count_rejection(self, error: GatewayError, account: Account | None) -> None:
        self.metrics.count_rejection(error.code or error.type)
        if account is not None:
            account.count_refusal()


def _check_scheduling(request: GenerationRequest) -> None:
    if not -(2**31) <= request.priority < 2**31:
        raise InvalidRequest(
            f"priority must be from {-(2**31)} to {2**31 - 1}, got {request.priority}",
            param="priority",
        )
    for param, seconds in (
        ("queue_timeout", request.queue_timeout_s),
        ("deadline", request.deadline_s),
    ):
        if seconds is not None and not 0 < seconds <= MAX_WAIT_S:
            raise InvalidRequest(
                f"{param} must be above 0 and at most {MAX_WAIT_S:g} seconds, got {seconds:g}",
                param=param,
            )


def _token_request(prepared: PreparedGeneration) -> TokenRequest:
    request = prepared.request
    return TokenRequest(
        prompt_token_ids=prepared.prompt_token_ids,
        params=prepared.params,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        priority=request.priority,
        queue_timeout_s=request.queue_timeout_s,
        deadline_s=request.deadline_s,
    )


def _engine_checked[T](make: Callable[[], T]) -> T:
    """Build a value of the engine's, with its complaints as ours."""
    try:
        return make()
    except EngineError as exc:
        raise from_engine_error(exc) from exc
