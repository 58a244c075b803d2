"""Stands in for the server that a bench command starts: answers in its own thread, keeps count."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import orjson
import pytest
from aiohttp import web

from bench import own_server
from bench.server_process import ServerFailed, ServerProcess

__all__ = ["FakeServe", "flag_value"]

NUMBER = web.AppKey("number", int)

# Seconds until a token: of a request's body, and the flags of the server.
type Pace = Callable[[dict, Sequence[str]], float]


def flag_value(command: Sequence[str], flag: str) -> str | None:
    """The word after a flag of a command line."""
    return command[command.index(flag) + 1] if flag in command else None


class FakeServe:
    """A `headrace serve` that gives every request as many tokens as it asks for.

    Args:
        pace: seconds before each token; None sends them as fast as it can.
        refuse: status for a request that is not answered; None answers it.
        max_model_len: as listed.
        max_output: no answer is longer.

    Attributes:
        commands: with which servers were started.
        bodies: of all requests, with the number of the server that got them.
        connection_headers: what each of these said of its connection.
        num_unfinished: requests that are being answered.
    """

    def __init__(
        self,
        *,
        pace: Pace | None = None,
        refuse: Callable[[dict, Sequence[str]], int | None] | None = None,
        max_model_len: int = 512,
        max_output: int = 1 << 20,
    ) -> None:
        self.commands: list[list[str]] = []
        self.bodies: list[tuple[int, dict]] = []
        self.connection_headers: list[str | None] = []
        self._pace = pace
        self._refuse = refuse
        self._max_model_len = max_model_len
        self._max_output = max_output
        self._num_tokens = 0
        self.num_unfinished = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the bench commands start this instead of a server."""
        monkeypatch.setattr(own_server, "find_headrace", lambda: "headrace")
        monkeypatch.setattr(own_server, "running_server", self.run)

    @contextmanager
    def run(
        self, command: Sequence[str], *, output: object, **_: object
    ) -> Iterator[ServerProcess]:
        number = len(self.commands)
        self.commands.append(list(command))
        if "--broken" in command:
            print("no such flag", file=output)
            raise ServerFailed("the server ended before it was ready, with exit code 2")
        ready = threading.Event()
        loop = asyncio.new_event_loop()
        port = 0

        async def serve() -> web.AppRunner:
            nonlocal port
            runner = web.AppRunner(self.make_app(number), handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            return runner

        def work() -> None:
            asyncio.set_event_loop(loop)
            runner = loop.run_until_complete(serve())
            ready.set()
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.close()

        thread = threading.Thread(target=work)
        thread.start()
        ready.wait()
        try:
            yield ServerProcess(f"http://127.0.0.1:{port}", 0.1, 0.2, os.getpid())
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def make_app(self, number: int) -> web.Application:
        app = web.Application()
        app[NUMBER] = number
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.completions)
        return app

    async def models(self, _: web.Request) -> web.Response:
        entry = {"id": "tiny", "max_model_len": self._max_model_len}
        return web.json_response({"data": [entry]})

    async def metrics(self, _: web.Request) -> web.Response:
        # Every token is a step of a millisecond, with one slot of four wasted.
        tokens = self._num_tokens
        text = (
            f"headrace_engine_busy_seconds_total {tokens / 1000}\n"
            f"headrace_engine_steps_total {tokens}\n"
            f"headrace_iteration_tokens_sum {3 * tokens}\n"
            f'headrace_wasted_slots_total{{cause="finished_row"}} {tokens}\n'
            f"headrace_draft_tokens_total {2 * tokens}\n"
            f"headrace_accepted_draft_tokens_total {tokens}\n"
            f"headrace_num_requests_running {self.num_unfinished}\n"
        )
        return web.Response(text=text)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = request.app[NUMBER]
        command = self.commands[number]
        self.bodies.append((number, body))
        self.connection_headers.append(request.headers.get("Connection"))
        status = self._refuse(body, command) if self._refuse else None
        if status is not None:
            return web.json_response(
                {"error": {"message": "no"}}, status=status, headers={"Retry-After": "1"}
            )
        if not body.get("stream"):
            choice = {"text": "", "token_ids": body["prompt"][:1] * body["max_tokens"]}
            return web.json_response({"choices": [choice]})
        self.num_unfinished += 1
        try:
            return await self.stream(request, body, command)
        finally:
            self.num_unfinished -= 1

    async def stream(
        self, request: web.Request, body: dict, command: Sequence[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        num_tokens = min(body["max_tokens"], self._max_output)
        for count in range(1, num_tokens + 1):
            if self._pace:
                await asyncio.sleep(self._pace(body, command))
            self._num_tokens += 1
            last = count == num_tokens
            choice = {"index": 0, "text": "x", "finish_reason": "length" if last else None}
            prompt = body.get("prompt") or body["messages"][0]["content"]
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
            chunk = {"choices": [choice], "usage": usage}
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
