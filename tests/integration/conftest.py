"""One tiny server for all tests that need a real process and do not end it."""

import aiohttp
import pytest

from serving import TINY, served


@pytest.fixture(scope="session")
def tiny_server():
    with served(*TINY) as server:
        yield server


@pytest.fixture
async def session(tiny_server):
    """A session with the tiny server."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(tiny_server.url, connector=connector) as session:
        yield session
