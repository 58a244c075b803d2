async def test_a_living_engine_is_healthy_and_ready(gateway):
    assert await gateway.get("/health") == (200, {"status": "ok"})
    assert await gateway.get("/ready") == (200, {"status": "ready"})


async def test_an_engine_that_loads_or_drains_is_healthy_but_not_ready(gateway):
    gateway.engine.is_ready = False
    assert await gateway.get("/health") == (200, {"status": "not_ready"})
    assert await gateway.get("/ready") == (503, {"status": "not_ready"})


async def test_a_dead_engine_is_neither(gateway):
    gateway.engine.die("the device is gone")
    reason = "the engine has failed"
    assert await gateway.get("/health") == (503, {"status": "dead", "reason": reason})
    assert (await gateway.get("/ready"))[0] == 503


async def test_an_engine_that_hangs_is_neither_and_the_reason_is_told(gateway):
    gateway.engine.is_stalled = True
    gateway.engine.is_ready = False
    status, body = await gateway.get("/health")
    assert (status, body["status"]) == (503, "stalled")
    assert "--step-timeout" in body["reason"]
    assert await gateway.get("/ready") == (503, {"status": "stalled"})
    # It may get on again.
    gateway.engine.is_stalled = False
    gateway.engine.is_ready = True
    assert await gateway.get("/health") == (200, {"status": "ok"})


async def test_the_version_is_told(gateway):
    status, body = await gateway.get("/version")
    assert status == 200
    assert isinstance(body["version"], str)
