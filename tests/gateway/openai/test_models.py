async def test_every_name_is_listed_with_the_length_of_the_context(start_gateway):
    gateway = await start_gateway(served_model_names=("org/tiny", "alias"))
    status, body = await gateway.get("/v1/models")
    assert (status, body["object"]) == (200, "list")
    assert [model["id"] for model in body["data"]] == ["org/tiny", "alias"]
    assert {model["max_model_len"] for model in body["data"]} == {1024}
    assert {model["object"] for model in body["data"]} == {"model"}


async def test_a_name_may_hold_a_slash(start_gateway):
    gateway = await start_gateway(served_model_names=("org/tiny",))
    assert (await gateway.get("/v1/models/org/tiny"))[1]["id"] == "org/tiny"


async def test_an_unknown_name_is_status_404(gateway):
    status, body = await gateway.get("/v1/models/other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_the_name_that_was_asked_for_is_answered(start_gateway):
    gateway = await start_gateway(served_model_names=("tiny", "alias"))
    body = {"prompt": "x", "max_tokens": 1}
    assert (await gateway.post("/v1/completions", body))[1]["model"] == "tiny"
    _, answer = await gateway.post("/v1/completions", {**body, "model": "alias"})
    assert answer["model"] == "alias"
