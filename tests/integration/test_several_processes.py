"""One model in two processes, as on two hosts: one serves, the other follows."""

import os
import socket
import subprocess
from pathlib import Path

import aiohttp
import numpy as np

from bench.server_process import find_headrace
from golden_model import TINY_DIR
from jaxengine.weights.source import cache_dir
from serving import TINY, served

SHARED = (*TINY, "--dtype", "float32", "--tensor-parallel-size", "2", "--num-processes", "2")


async def test_two_processes_give_the_answers_of_hugging_face_and_end_together():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    arguments = (*SHARED, "--coordinator-address", address)
    environment = {"JAX_COMPILATION_CACHE_DIR": str(Path(cache_dir()) / "test-compiled")}
    with subprocess.Popen(
        [find_headrace(), "serve", *arguments, "--process-id", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as follower:
        try:
            with served(*arguments, "--process-id", "0", environment=environment) as leader:
                assert "on 2 devices (cpu)" in leader.log
                assert "each device has 2 of 4 query heads and 1 of 2 kv heads" in leader.log
                async with aiohttp.ClientSession(leader.url) as session:
                    await check_answers(session)
            _, said = follower.communicate()
            assert follower.returncode == 0, said[-2000:]
            assert "process 1 of 2 follows process 0" in said
            assert "process 0 has ended" in said
        finally:
            follower.kill()


async def check_answers(session):
    golden = np.load(TINY_DIR / "llama" / "golden.npz")
    for name in "01":
        expected = golden[f"greedy_{name}"].tolist()
        body = {
            "prompt": golden[f"prompt_{name}"].tolist(),
            "max_tokens": len(expected),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        assert await token_ids(session, body) == expected
        # Rules about tokens are arrays that both processes must have.
        assert await token_ids(session, {**body, "allowed_token_ids": [42]}) == [42] * len(expected)


async def token_ids(session, body):
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    return answer["choices"][0]["token_ids"]
