"""Signing in to a server with keys, in a real browser."""

import pytest

from browser import find_chromium, open_page
from gateway.api_keys import ApiKey, hash_of_key
from gateway.key_ring import KeyRing

CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH"
    ),
]

IS_OPEN = "document.getElementById('state').dataset.state === 'open'"


def asked(text) -> str:
    """A condition: the dialog is there and says this."""
    return f"document.querySelector('.sign-in label')?.textContent.includes({text!r})"


async def give(page, key):
    await page.run("document.getElementById('api-key').focus()")
    await page.type(key)
    await page.press("Enter")


async def test_a_page_asks_for_a_key_until_it_fits_and_keeps_it_for_the_tab(
    start_gateway, tmp_path
):
    assert CHROMIUM is not None
    keys = [
        ApiKey(name="alice", sha256=hash_of_key("key-of-alice")),
        ApiKey(name="root", sha256=hash_of_key("key-of-root"), admin=True),
    ]
    gateway = await start_gateway(keys=KeyRing(keys))
    async with open_page(CHROMIUM, tmp_path) as page:
        await page.goto(gateway.url)
        await page.wait_for(asked("wants an API key"))
        await page.press("Escape")  # leads nowhere, and closes nothing even for a moment
        assert await page.run("document.querySelector('.sign-in').open")
        await give(page, "wrong")
        await page.wait_for(asked("does not know"))
        await give(page, "key-of-alice")
        await page.wait_for(IS_OPEN)

        await page.run("document.getElementById('input').focus()")
        await page.type("Hi!")
        await page.press("Enter")
        await gateway.engine.wait_for_requests(1)
        assert gateway.engine.requests[0].tenant == "alice"

        # Another page of the same tab has it, but it is not enough there.
        await page.goto(f"{gateway.url}/dashboard")
        await page.wait_for(asked("admin"))
        await give(page, "key-of-root")
        await page.wait_for(IS_OPEN)
        addresses = await page.run("JSON.stringify(performance.getEntries().map(e => e.name))")
        assert "key-of-" not in addresses

        # So has the page of addresses, whose document needs one as well.
        await page.goto(f"{gateway.url}/docs")
        await page.wait_for(IS_OPEN)
        assert "POST\n/v1/chat/completions" in await page.text(".operation > summary")
        chat = (
            "[...document.querySelectorAll('.operation')].find("
            "e => e.innerText.includes('/v1/chat/completions'))"
        )
        await page.run(f"{chat}.open = true")
        assert "messages (required)" in await page.run(f"{chat}.innerText")
        assert page.errors == []
