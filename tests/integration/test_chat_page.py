"""The chat page in a real browser, against the gateway on a FakeEngine."""

from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from browser import find_chromium, open_page
from fakes import FakeEngine
from gateway.connections import STREAM_CONNECTIONS
from stream_app import MODEL, serve_streams

CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no chromium, chromium-browser or google-chrome on PATH",
    ),
    # One browser for all tests of the file: starting it takes longer than any of them.
    pytest.mark.asyncio(loop_scope="module"),
]

IS_OPEN = "document.getElementById('state').dataset.state === 'open'"
IS_IDLE = "document.getElementById('stop').hidden"
ANSWER = ".turn.assistant:last-child .text"
NUMBERS = ".turn.assistant:last-child .meta"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory):
    assert CHROMIUM is not None
    async with open_page(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def chat(browser):
    """A page that is connected to a gateway: (page, gateway). It must end without any error."""
    async with serve_streams(FakeEngine(max_model_len=8192)) as gateway:
        await browser.goto(gateway.base_url)
        await browser.run("localStorage.clear()")
        await browser.goto(gateway.base_url)
        await browser.wait_for(IS_OPEN)
        yield browser, gateway
        await browser.goto("about:blank")
    assert browser.errors == []


async def ask(page, question):
    await page.run("document.getElementById('input').focus()")
    await page.type(question)
    await page.press("Enter")


def shown(token_ids) -> str:
    """Return the text of a prompt, without special tokens."""
    return bytes(i for i in token_ids if i < 256).decode()


async def test_the_page_loads_and_names_the_model(chat):
    page, _ = chat
    assert await page.text("#state-text") == MODEL
    assert await page.run("document.activeElement.id") == "input"
    assert await page.run("document.getElementById('send').disabled")
    assert await page.run("document.querySelector('.sign-in')") is None  # nobody has to sign in


async def test_an_answer_streams_in_and_ends_with_its_numbers(chat):
    page, gateway = chat
    engine = gateway.engine
    engine.script_all("Paris, of course.")
    engine.hold()
    await ask(page, "What is the capital of France?")
    await engine.wait_for_requests(1)
    assert await page.text(".turn.user .text") == "What is the capital of France?"
    engine.step(5)
    await page.wait_for(f"document.querySelector('{ANSWER}').innerText === 'Paris'")
    assert "5 tokens" in await page.text(NUMBERS)
    assert not await page.run(IS_IDLE)
    engine.release()
    await page.wait_for(IS_IDLE)
    assert await page.text(ANSWER) == "Paris, of course."
    numbers = await page.text(NUMBERS)
    for part in ("18 tokens", "100.0 tokens/s", "first token 10 ms", "prompt tokens cached"):
        assert part in numbers
    assert "complete" in numbers
    assert await page.run("document.activeElement.id") == "input"


async def test_the_model_is_told_the_whole_conversation_until_a_new_chat(chat):
    page, gateway = chat
    gateway.engine.script_all("Yes.")
    for number, question in enumerate(("First?", "Second?"), 1):
        await ask(page, question)
        await page.wait_for(f"document.querySelectorAll('.meta button').length === {number}")
    await page.click("#new-chat")
    assert await page.text("#log") == ""
    await ask(page, "Third?")
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    first, second, third = (shown(prompt) for prompt, _ in gateway.engine.submitted)
    assert "First?" in first
    assert all(text in second for text in ("First?", "Yes.", "Second?"))
    assert "First?" not in third
    assert "Third?" in third


@pytest.mark.parametrize("how", ["button", "escape"])
async def test_stop_ends_the_answer_and_keeps_what_came(chat, how):
    page, gateway = chat
    engine = gateway.engine
    engine.script_all("one two three")
    engine.hold()
    await ask(page, "Count.")
    await engine.wait_for_requests(1)
    engine.step(3)
    await page.wait_for(f"document.querySelector('{ANSWER}').innerText === 'one'")
    if how == "button":
        await page.click("#stop")
    else:
        await page.press("Escape")
    await engine.wait_until_idle()
    await page.wait_for(IS_IDLE)
    assert await page.text(ANSWER) == "one"
    assert "stopped by you" in await page.text(NUMBERS)


async def test_a_new_chat_during_an_answer_ends_it(chat):
    page, gateway = chat
    engine = gateway.engine
    engine.hold()
    await ask(page, "Go on for ever.")
    await engine.wait_for_requests(1)
    engine.step(3)
    await page.click("#new-chat")
    await engine.wait_until_idle()
    engine.release()
    engine.script_all("Fresh.")
    await ask(page, "Again?")
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    assert await page.text(ANSWER) == "Fresh."


async def test_settings_are_used_and_kept(chat):
    page, gateway = chat
    gateway.engine.script_all("Arr!")
    await page.click("#open-settings")
    await page.run(
        """(() => {
          const values = {system: "You are a pirate.", temperature: "0.25", top_p: "0.5",
                          max_tokens: "77", seed: "1234"};
          for (const [name, value] of Object.entries(values)) {
            const field = document.getElementById(name);
            field.value = value;
            field.dispatchEvent(new Event("input", {bubbles: true}));
          }
        })()"""
    )
    assert await page.text("#temperature-value") == "0.25"
    await page.click("#settings-form button[type=submit]")
    await page.goto(gateway.base_url)  # a reload keeps them
    await page.wait_for(IS_OPEN)
    await ask(page, "Hello")
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    prompt, params = gateway.engine.submitted[0]
    assert shown(prompt).startswith("system\nYou are a pirate.")
    assert (params.temperature, params.top_p) == (0.25, 0.5)
    assert (params.max_tokens, params.seed) == (77, 1234)


async def test_what_the_model_says_is_never_html(chat):
    page, gateway = chat
    evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    gateway.engine.script_all(f"{evil}\n```html\n{evil}\n```\n{evil}")
    await ask(page, f"{evil} & more")
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    assert await page.run("typeof window.hacked") == "undefined"
    assert await page.run("document.querySelectorAll('#log script, #log img').length") == 0
    assert (await page.text(ANSWER)).count(evil) == 3
    assert evil in await page.text(".turn.user .text")


async def test_code_fences_become_code_blocks_however_they_are_split(chat):
    page, gateway = chat
    # The fake sends one byte a token, so each fence arrives in pieces.
    gateway.engine.script_all("Look:\n\n```python\nx = `1`\n\n  y\n```\n\nDone ``` not a fence.")
    await ask(page, "Code, please.")
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    assert await page.run("document.querySelector('.code pre').textContent") == "x = `1`\n\n  y"
    assert await page.text(".code-head") == "python"
    proses = "[...document.querySelectorAll('.prose')].map(e => e.textContent)"
    assert await page.run(proses) == ["Look:", "Done ``` not a fence."]


async def test_shift_enter_starts_a_new_line(chat):
    page, gateway = chat
    gateway.engine.script_all("ok")
    await page.run("document.getElementById('input').focus()")
    await page.type("one")
    await page.press("Enter", shift=True)
    await page.type("two")
    assert await page.run("document.getElementById('input').value") == "one\ntwo"
    await page.press("Enter")
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    assert "one\ntwo" in shown(gateway.engine.submitted[0][0])


async def test_a_refusal_is_shown_and_the_question_is_not_kept(chat):
    page, gateway = chat
    await ask(page, "refuse")  # the fake's template does
    await page.wait_for("document.querySelector('.problem') !== null")
    assert "template" in await page.text(".problem")
    gateway.engine.script_all("ok")
    await ask(page, "Better?")
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    assert "refuse" not in shown(gateway.engine.submitted[0][0])


async def test_pulled_in_mid_answer_the_text_goes_on(chat):
    page, gateway = chat
    engine = gateway.engine
    text = "Grüße, 世界! 😀 All of it, and in order."
    engine.script_all(text)
    engine.hold()
    await ask(page, "Say it.")
    await engine.wait_for_requests(1)
    for num_steps in (3, 9, 4):
        engine.step(num_steps)
        so_far = text.encode()[: engine.generation_tokens].decode(errors="ignore")
        await page.wait_for(f"document.querySelector('{ANSWER}').innerText === '{so_far}'")
        for connection in list(gateway.app[STREAM_CONNECTIONS]):
            connection.cut()
        await page.wait_for("document.querySelector('.interrupted') !== null")
        engine.step(2)  # while nobody is there
        await page.click("#retry")
        await page.wait_for("document.querySelector('.interrupted') === null")
    engine.release()
    await page.wait_for(IS_IDLE)
    assert await page.text(ANSWER) == text
    assert "complete" in await page.text(NUMBERS)
    assert await page.run("document.querySelector('.problem') === null")
    assert engine.num_aborts == 0


async def test_stopped_while_there_is_no_connection_the_answer_ends_once_there_is_one(chat):
    page, gateway = chat
    engine = gateway.engine
    engine.hold()
    await ask(page, "Go on for ever.")
    await engine.wait_for_requests(1)
    engine.step(3)
    await page.wait_for(f"document.querySelector('{ANSWER}').innerText.length === 3")
    for connection in list(gateway.app[STREAM_CONNECTIONS]):
        connection.cut()
    await page.wait_for("document.querySelector('.interrupted') !== null")
    await page.click("#stop")
    await page.click("#retry")
    await engine.wait_until_idle()
    await page.wait_for(IS_IDLE)
    assert "stopped by you" in await page.text(NUMBERS)
    engine.release()


async def test_the_page_comes_back_after_the_server_restarted(browser):
    async with AsyncExitStack() as stack:
        engine = FakeEngine()
        gateway = await stack.enter_async_context(serve_streams(engine))
        port = gateway.client.port
        await browser.goto(gateway.base_url)
        await browser.wait_for(IS_OPEN)
        engine.hold()
        await ask(browser, "Are you there?")
        await engine.wait_for_requests(1)
        engine.step(2)
        await browser.wait_for(f"document.querySelector('{ANSWER}').innerText.length === 2")
        for connection in gateway.app[STREAM_CONNECTIONS]:
            connection.cut()
        await browser.wait_for("document.getElementById('state').dataset.state === 'waiting'")
        assert await browser.run("document.querySelector('.interrupted') !== null")
        assert "next try in" in await browser.text("#state-text")
    assert engine.num_active == 0

    engine = FakeEngine()
    engine.script_all("Back again.")
    async with serve_streams(engine, port=port):
        await browser.click("#retry")
        await browser.wait_for(IS_OPEN)
        # The new server knows nothing of the answer; what came of it stays.
        await browser.wait_for("document.querySelector('.problem') !== null")
        assert "lost" in await browser.text(".problem")
        await ask(browser, "And now?")
        await browser.wait_for("document.querySelectorAll('.meta button').length === 2")
        assert await browser.text(ANSWER) == "Back again."
        await browser.goto("about:blank")
    browser.errors.clear()  # a refused connection is one, rightly


@pytest.mark.parametrize("width", [320, 390, 1280])
async def test_nothing_is_wider_than_the_window(chat, width):
    page, gateway = chat
    gateway.engine.script_all("x" * 300 + "\n```\n" + "y" * 300 + "\n```\n")
    await page.resize(width, 700)
    await ask(page, "w" * 200)
    await page.wait_for("document.querySelectorAll('.meta button').length === 1")
    assert await page.run("document.documentElement.scrollWidth") <= width
    assert await page.run("document.getElementById('scroller').scrollWidth") <= width
    await page.click("#open-settings")
    assert await page.run("document.getElementById('settings').getBoundingClientRect().right") <= (
        width
    )


async def test_every_control_has_a_name(chat):
    page, _ = chat
    tree = await page.call("Accessibility.getFullAXTree")
    roles = {"button", "textbox", "slider", "spinbutton"}
    controls = [
        node
        for node in tree["nodes"]
        if node.get("role", {}).get("value") in roles and not node.get("ignored")
    ]
    assert len(controls) >= 7
    assert [node for node in controls if not node.get("name", {}).get("value")] == []
