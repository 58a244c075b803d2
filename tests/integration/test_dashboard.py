"""The dashboard in a real browser, against the gateway on a FakeEngine with made-up steps."""

import json

import pytest
import pytest_asyncio

from browser import find_chromium, open_page
from fakes import FakeEngine
from gateway.app_keys import METRICS
from gateway.connections import STREAM_CONNECTIONS
from jaxengine.stats import EngineStats
from step_records import make_step, make_steps
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

# Middle of the newest bar: bars are 6 pixels apart and end 6 pixels left of the edge.
NEWEST_X = 9
PITCH = 6

NOTHING = "\u2013"  # what a tile shows instead of a number


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory):
    assert CHROMIUM is not None
    async with open_page(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        await page.resize(1280, 860)
        # Bars then stand still at once.
        features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        await page.call("Emulation.setEmulatedMedia", features=features)
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def dashboard(browser):
    """A page that is connected to a gateway: (page, gateway). It must end without any error."""
    async with serve_streams(FakeEngine()) as gateway:
        await browser.resize(1280, 860)
        await browser.goto(f"{gateway.base_url}dashboard")
        await browser.wait_for(IS_OPEN)
        yield browser, gateway
        await browser.goto("about:blank")
    assert browser.errors == []


def title_is(index: int) -> str:
    return f"document.getElementById('details-title').textContent === 'Step {index}'"


def text_is(element_id: str, text: str) -> str:
    return f"document.getElementById({element_id!r}).textContent === {text!r}"


async def column(page, from_right: float) -> list[str]:
    """Return the colours in the chart at so many pixels from its right edge, top to bottom.

    By their names in the style sheet; what has no name is left out.
    """
    return [name for name, _ in await column_with_places(page, from_right)]


async def column_with_places(page, from_right: float) -> list[tuple[str, int]]:
    """Return the same and where each colour begins, in pixels from the top."""
    await page.run("new Promise(requestAnimationFrame)")  # what is due has been drawn
    script = """(fromRight => {
      const canvas = document.getElementById("chart");
      const probe = document.createElement("canvas").getContext("2d");
      const names = {};
      for (const name of ["decode", "prefill", "wasted", "time", "predicted", "bad"]) {
        const style = getComputedStyle(canvas).getPropertyValue(`--${name}`);
        probe.fillStyle = style;
        probe.fillRect(0, 0, 1, 1);
        names[probe.getImageData(0, 0, 1, 1).data.join()] = name;
      }
      const ratio = devicePixelRatio;
      const x = Math.round((canvas.clientWidth - fromRight) * ratio);
      const data = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height).data;
      const found = [];
      for (let y = 0; y < canvas.height; y++) {
        const name = names[[...data.slice(4 * y, 4 * y + 4)].join()];
        if (name && found.at(-1)?.[0] !== name) found.push([name, y / ratio]);
      }
      return found;
    })"""
    return await page.run(f"{script}({from_right})")


async def chart_point(page, from_right: float) -> tuple[float, float]:
    """Return the place in the window that is so far from the right edge of the chart."""
    box = await page.run("(b => [b.right, b.top])(chart.getBoundingClientRect())")
    return box[0] - from_right, box[1] + 60


async def move_mouse(page, x, y):
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


async def test_the_page_loads_says_what_it_watches_and_that_there_is_nothing_yet(dashboard):
    page, _ = dashboard
    assert await page.text("#state-text") == MODEL
    assert "No steps yet" in await page.text("#empty")
    assert await page.text("#ttft-p50") == NOTHING


async def test_each_step_is_a_bar_of_what_it_was_made_of(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 3))
    await page.wait_for(title_is(2))
    assert await page.run("document.getElementById('empty').hidden")
    # From the top: 1 slot wasted, 6 of prefill, 1 of decode; then 16 ms, predicted 15.
    expected = ["wasted", "prefill", "decode", "time", "predicted", "time"]
    for bar in range(3):
        assert await column(page, NEWEST_X + bar * PITCH) == expected
    assert await column(page, NEWEST_X + 3 * PITCH) == []
    gateway.engine.steps.extend([make_step(3, num_preempted=1, prefill_tokens=0, wasted_slots=7)])
    await page.wait_for(title_is(3))
    newest = await column(page, NEWEST_X)
    assert newest == ["bad", "wasted", "decode", "time", "predicted", "time"]
    assert await column(page, NEWEST_X + PITCH) == expected


async def test_a_step_without_prediction_has_no_mark(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend([make_step(0, predicted_s=None)])
    await page.wait_for(title_is(0))
    assert await column(page, NEWEST_X) == ["wasted", "prefill", "decode", "time"]
    assert "no prediction" in await page.text("#facts")


async def test_one_slow_step_is_capped_and_does_not_flatten_the_others(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 20))  # 16 ms each
    await page.wait_for(title_is(19))
    gateway.engine.steps.extend([make_step(20, end_s=make_step(20).device_start_s + 5)])
    await page.wait_for(title_is(20))
    assert "5000 ms" in await page.text("#facts")
    cap, slow, *_ = (await column_with_places(page, NEWEST_X))[3:]
    assert (cap[0], slow[0]) == ("bad", "time")
    *_, usual, predicted, _ = await column_with_places(page, NEWEST_X + PITCH)
    assert (usual[0], predicted[0]) == ("time", "predicted")
    # The scale ends at 2.5 times 16 ms, so 16 ms are 0.4 of the height and 1 ms the rest.
    assert predicted[1] - usual[1] >= 1
    assert usual[1] > slow[1] + 30


async def test_steps_from_before_the_page_was_opened_are_there(browser):
    async with serve_streams(FakeEngine()) as gateway:
        gateway.engine.steps.extend(make_steps(0, 50))
        await browser.goto(f"{gateway.base_url}dashboard")
        await browser.wait_for(title_is(49))
        assert "decode" in await column(browser, NEWEST_X + 49 * PITCH)
        await browser.goto("about:blank")
    assert browser.errors == []


async def test_the_height_can_be_the_share_of_the_bucket(dashboard):
    page, gateway = dashboard
    small = make_step(0, num_slots=2, wasted_slots=1, prefill_tokens=0)
    gateway.engine.steps.extend([small, make_step(1, num_slots=800, wasted_slots=793)])
    await page.wait_for(title_is(1))
    at_small, at_large = NEWEST_X + PITCH, NEWEST_X
    (_, small_top), _, *_ = await column_with_places(page, at_small)
    (_, large_top), *_ = await column_with_places(page, at_large)
    assert small_top > large_top + 100
    await page.click("input[value=share]")
    (wasted, small_top), (decode, middle), *_ = await column_with_places(page, at_small)
    assert (wasted, decode) == ("wasted", "decode")
    assert small_top == large_top  # both are as high as the strip
    assert middle > small_top + 50  # half of the small bucket was wasted


async def test_pointing_at_a_step_shows_it_and_holds_the_picture(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 10))
    await page.wait_for(title_is(9))
    await move_mouse(page, *await chart_point(page, NEWEST_X + 4 * PITCH))
    await page.wait_for(title_is(5))
    assert await page.text("#details-tag") == "under the pointer"
    assert await page.run("!document.getElementById('held').hidden")
    facts = await page.text("#facts")
    for part in ("1 token of 1 request", "6 tokens of 1 request", "8 slots, 1 wasted (13 %)",
                 "16 ms", "15 ms; took 6.7 % more", "3 wait for a free row",
                 "30 used, 20 cached, 50 free"):  # fmt: skip
        assert part in facts
    rows = await page.run(
        "[...document.querySelectorAll('#shares tr')]"
        ".map(tr => [...tr.cells].map(td => td.textContent))"
    )
    assert rows == [["a", "decode", "45"], ["b", "prefill 6", "30\u201335"]]
    # New steps come, and the bar under the pointer stays.
    before = await column(page, NEWEST_X)
    gateway.engine.steps.extend([make_step(10, prefill_tokens=0, wasted_slots=7)])
    gateway.engine.steps.extend(make_steps(11, 12))
    await page.wait_for(title_is(5))
    assert await column(page, NEWEST_X) == before
    await move_mouse(page, 5, 5)
    await page.wait_for(title_is(11))
    assert await page.run("document.getElementById('held').hidden")


async def test_a_click_selects_a_step_and_another_lets_go(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 10))
    await page.wait_for(title_is(9))
    x, y = await chart_point(page, NEWEST_X + 2 * PITCH)
    touch = [{"x": x, "y": y}]
    await page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        for title, tag in ((title_is(7), "selected"), (title_is(9), "the newest")):
            await page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=touch)
            await page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            await page.wait_for(title)
            await page.wait_for(text_is("details-tag", tag))
    finally:
        await page.call("Emulation.setTouchEmulationEnabled", enabled=False)


async def test_the_chart_can_be_read_with_the_keyboard(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 40))
    await page.wait_for(title_is(39))
    await page.run("document.getElementById('chart').focus()")
    for key, index in (
        *(("ArrowLeft", 39), ("ArrowLeft", 38), ("PageUp", 28), ("ArrowRight", 29)),
        *(("Home", 0), ("ArrowLeft", 0), ("End", 39), ("ArrowRight", 39)),
    ):
        await page.run(
            f"chart.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
        )
        await page.wait_for(title_is(index))
        assert await page.run("chart.getAttribute('aria-valuenow')") == str(index)
    said = await page.run("chart.getAttribute('aria-valuetext')")
    assert said == (
        "Step 39; 1 decode token, 6 prefill tokens; 1 of 8 slots wasted; took 16 milliseconds; "
        "predicted 15."
    )
    await page.press("Escape")
    await page.wait_for(text_is("details-tag", "the newest"))


async def test_pause_stops_the_picture_and_resume_catches_up(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 5))
    await page.wait_for(title_is(4))
    await page.click("#pause")
    assert "paused" in await page.text("#state-text")
    assert await page.run("document.getElementById('pause').ariaPressed") == "true"
    before = await column(page, NEWEST_X)
    gateway.engine.steps.extend(make_steps(5, 8, prefill_tokens=0, wasted_slots=7))
    await page.run("new Promise(resolve => setTimeout(resolve, 300))")  # nothing may happen
    assert await column(page, NEWEST_X) == before
    await page.click("#pause")
    await page.wait_for(title_is(7))
    assert "prefill" not in await column(page, NEWEST_X)
    assert await page.text("#state-text") == MODEL


async def test_the_numbers_on_top_follow_the_engine(dashboard, monkeypatch):
    page, gateway = dashboard
    now = {
        "num_running": 5, "num_waiting": 2, "waiting_for": "kv_cache",
        "num_blocks": 100, "num_free_blocks": 70, "num_cached_blocks": 20, "num_preemptions": 7,
    }  # fmt: skip
    monkeypatch.setattr(gateway.engine, "stats", lambda: EngineStats(**now))
    await page.wait_for(text_is("running", "5"))
    assert await page.text("#waiting") == "2 wait for KV blocks"
    assert await page.text("#kv-used") == "30 %"
    assert await page.text("#kv-more") == "30 used · 20 cached · 50 free blocks"
    assert await page.text("#preemptions-more") == "7 since the start"
    # From here: 100 steps of 20 ms, each 1 ms off; 8 slots each, 2 of them padding.
    now |= {
        "num_preemptions": 9, "generation_tokens": 100, "prompt_tokens": 500,
        "num_steps": 100, "step_time_sum_s": 2.0,
        "num_predicted_steps": 100, "step_prediction_error_s": 0.1,
        "iteration_tokens_sum": 600, "padded_tokens": 200,
    }  # fmt: skip
    await page.wait_for(text_is("wasted", "25 %"))
    assert "25 % to fill buckets, 0 % in batches" in await page.text("#wasted-more")
    assert await page.text("#prediction") == "5.0 %"
    assert await page.text("#prediction-more") == "1.0 ms off on average in 30 s"
    assert await page.text("#preemptions-more") == "9 since the start"
    assert float(await page.text("#output-rate")) > 0


async def test_latencies_are_those_of_the_metrics(dashboard):
    page, gateway = dashboard
    metrics = gateway.app[METRICS]
    # The page shows what is new since it first looked.
    await page.wait_for(
        "performance.getEntriesByType('resource')"
        ".some(entry => entry.name.endsWith('metrics') && entry.responseEnd > 0)"
    )
    # All in the bucket from 20 to 30 ms: halfway through the ranks is halfway through it.
    for _ in range(100):
        metrics.observe_inter_token_latency(0.025)
    await page.wait_for(f"document.getElementById('itl-p50').textContent !== '{NOTHING}'")
    assert await page.text("#itl-p50") == "25 ms"
    assert await page.text("#itl-more") == "p99 30 ms · 100 tokens in 30 s"
    assert await page.text("#ttft-p50") == NOTHING


async def test_percentiles_are_those_of_prometheus(dashboard):
    page, _ = dashboard
    text = "\n".join(
        [
            "# TYPE headrace_x_seconds histogram",
            'headrace_x_seconds_bucket{le="0.1",model_name="m"} 10.0',
            'headrace_x_seconds_bucket{le="0.5",model_name="m"} 30.0',
            'headrace_x_seconds_bucket{le="1.0",model_name="m"} 40.0',
            'headrace_x_seconds_bucket{le="+Inf",model_name="m"} 41.0',
            'headrace_x_seconds_buckets{le="1.0"} 7',
        ]
    )
    script = """import("./static/latency.js").then(({parseBuckets, quantile}) => {
      const buckets = parseBuckets(%s, "headrace_x_seconds");
      return [0, 0.1, 0.5, 0.9, 1].map(q => quantile(buckets, q)).concat([quantile([], 0.5)]);
    })"""
    found = await page.run(script % json.dumps(text))
    # Rank 4.1 of 10 in 0..0.1; 20.5 - 10 of 20 in 0.1..0.5; 36.9 - 30 of 10 in 0.5..1; beyond 1.
    assert found[:1] == [0]
    assert found[1:5] == pytest.approx([0.041, 0.31, 0.845, 1.0])
    assert found[5] is None


async def test_the_trace_can_be_downloaded(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 3))
    count = await page.run(
        "fetch(document.querySelector('a[download]').href).then(r => r.json())"
        ".then(trace => trace.traceEvents.filter(e => e.name.startsWith('step ')).length)"
    )
    assert count >= 3


async def test_the_pages_lead_to_each_other(dashboard):
    page, gateway = dashboard
    await page.goto(await page.run("document.querySelector('a[title=Chat]').href"))
    assert await page.run("document.getElementById('composer') !== null")
    assert await page.run("document.querySelector('a[title=Dashboard]').href") == (
        f"{gateway.base_url}dashboard"
    )


async def test_the_dashboard_comes_back_after_the_server_restarted(browser):
    engine = FakeEngine()
    async with serve_streams(engine) as gateway:
        port = gateway.client.port
        engine.steps.extend(make_steps(0, 20))
        await browser.goto(f"{gateway.base_url}dashboard")
        await browser.wait_for(title_is(19))
        for connection in gateway.app[STREAM_CONNECTIONS]:
            connection.cut()
        await browser.wait_for("document.getElementById('state').dataset.state === 'waiting'")
        assert "next try in" in await browser.text("#state-text")
        await browser.wait_for(IS_OPEN)  # by itself
    await browser.wait_for("document.getElementById('state').dataset.state === 'waiting'")

    engine = FakeEngine()
    engine.steps.extend(make_steps(0, 3))  # they count from 0 again
    async with serve_streams(engine, port=port):
        await browser.click("#retry")
        await browser.wait_for(IS_OPEN)
        await browser.wait_for(title_is(2))
        assert await column(browser, NEWEST_X + 3 * PITCH) == []
        await browser.goto("about:blank")
    browser.errors.clear()  # a refused connection is one, rightly


async def test_steps_that_were_missed_are_told(dashboard):
    page, gateway = dashboard
    gateway.engine.steps.extend(make_steps(0, 2))
    await page.wait_for(title_is(1))
    # The fake keeps 64 steps: more than that pass between two messages.
    gateway.engine.steps.extend(make_steps(2, 102))
    await page.wait_for(title_is(101))
    width = await page.run("document.getElementById('chart').clientWidth")
    assert await column(page, width - 20) == []  # no bar where the scale is
    await move_mouse(page, *await chart_point(page, NEWEST_X + 63 * PITCH))
    await page.wait_for(title_is(38))
    assert "36 steps not shown" in await page.text("#facts")  # 2 to 37
    await move_mouse(page, 5, 5)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
async def test_nothing_is_wider_than_the_window(dashboard, width):
    page, gateway = dashboard
    await page.resize(width, 700)
    share = make_step(0).shares[0]._replace(request_id="x" * 200)
    gateway.engine.steps.extend([make_step(0, shares=(share,) * 50)])
    await page.wait_for(title_is(0))
    assert await page.run("document.documentElement.scrollWidth") <= width


async def test_every_control_has_a_name(dashboard):
    page, _ = dashboard
    tree = await page.call("Accessibility.getFullAXTree")
    roles = {"button", "link", "slider", "radio"}
    controls = [
        node
        for node in tree["nodes"]
        if node.get("role", {}).get("value") in roles and not node.get("ignored")
    ]
    assert len(controls) >= 6
    assert [node for node in controls if not node.get("name", {}).get("value")] == []
