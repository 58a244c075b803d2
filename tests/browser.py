"""A headless Chromium, driven over the DevTools protocol with nothing but aiohttp."""

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

__all__ = ["Page", "find_chromium", "open_page"]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
]
KEYS = {"Enter": 13, "Escape": 27}


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. Methods return when the browser has done what they ask."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded: set[str] = set()  # documents, by their loaders
        self._has_loaded = asyncio.Event()
        self.errors: list[str] = []  # uncaught exceptions, and what the policy blocked
        self._reader = asyncio.create_task(self._read())

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        call_id = next(self._ids)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        message = {"id": call_id, "method": method, "params": params}
        await self._ws.send_str(orjson.dumps(message).decode())
        reply = await answer
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return reply["result"]

    async def goto(self, url: str) -> None:
        """Return when this document has loaded: the one before it may say so late."""
        loader = (await self.call("Page.navigate", url=url))["loaderId"]
        while loader not in self._loaded:
            self._has_loaded.clear()
            await self._has_loaded.wait()

    async def run(self, expression: str) -> Any:
        """Evaluate JavaScript, awaiting promises; return its value."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", result))
        return result["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Return once the JavaScript expression is true; it is looked at in every frame."""
        await self.run(
            "new Promise(resolve => { const look = () => "
            f"({condition}) ? resolve(true) : setTimeout(look, 5); look(); }})"
        )

    async def text(self, selector: str) -> str:
        """Return the text of all elements that match, as the user sees it."""
        return await self.run(
            f"[...document.querySelectorAll({selector!r})].map(e => e.innerText).join('\\n')"
        )

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({selector!r}).click()")

    async def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        code = KEYS[key]
        event = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )

    async def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        result = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(result["data"]))

    async def _read(self) -> None:
        async for frame in self._ws:
            message = orjson.loads(frame.data)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Page.lifecycleEvent":
                if message["params"]["name"] == "load":
                    self._loaded.add(message["params"]["loaderId"])
                    self._has_loaded.set()
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["source"] in ("security", "violation", "javascript"):
                    self.errors.append(entry["text"])


@asynccontextmanager
async def open_page(chromium: str, profile: Path) -> AsyncIterator[Page]:
    """Start a browser with an empty profile directory and one tab."""
    process = await asyncio.create_subprocess_exec(
        chromium,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    logs = None
    try:
        address = await _devtools_address(process.stderr)
        # Read on: a browser whose pipe is full stands still.
        logs = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as response:
                tabs = [tab for tab in await response.json() if tab["type"] == "page"]
            async with session.ws_connect(
                tabs[0]["webSocketDebuggerUrl"], max_msg_size=64 * 1024 * 1024
            ) as ws:
                page = Page(ws)
                try:
                    await page.start()
                    yield page
                finally:
                    await page.close()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if logs is not None:
            await logs


async def _devtools_address(stderr: asyncio.StreamReader) -> str:
    seen = ""
    while line := (await stderr.readline()).decode():
        seen += line
        if "DevTools listening on ws://" in line:
            return line.split("ws://")[1].split("/")[0]
    raise RuntimeError(f"the browser did not start: {seen}")
