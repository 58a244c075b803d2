import pytest

from gateway.errors import InvalidRequest
from gateway.openai.responses.input_items import input_item_page
from gateway.text_codec import ChatMessage, MessageCall

URL = "/v1/responses"
USER = ChatMessage(role="user", content="Hi")


def ids(messages, **query):
    return [item.id for item in input_item_page("resp_7", messages, query).data]


def test_the_last_item_comes_first_unless_asked_otherwise():
    assert ids([USER, USER]) == ["msg_7_1", "msg_7_0"]
    assert ids([USER, USER], order="asc") == ["msg_7_0", "msg_7_1"]


def test_pages_follow_each_other_without_a_gap():
    messages = [USER] * 5
    seen, after = [], {}
    while True:
        page = input_item_page("resp_7", messages, {"limit": "2", **after})
        seen += [item.id for item in page.data]
        assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
        if not page.has_more:
            break
        after = {"after": page.last_id}
    assert seen == [f"msg_7_{i}" for i in (4, 3, 2, 1, 0)]


def test_nothing_asked_is_an_empty_page():
    page = input_item_page("resp_7", [], {})
    assert (page.data, page.first_id, page.last_id, page.has_more) == ((), None, None, False)


def test_a_message_is_made_of_its_items_again():
    answer = ChatMessage(
        role="assistant",
        content="Let me see.",
        reasoning="Hm.",
        tool_calls=(MessageCall(id="call_1", name="look", arguments="{}"),),
    )
    result = ChatMessage(role="tool", content="42", tool_call_id="call_1")
    page = input_item_page("resp_7", [answer, result], {"order": "asc"})
    kinds = [type(item).__struct_config__.tag for item in page.data]
    assert kinds == ["reasoning", "message", "function_call", "function_call_output"]
    assert page.data[1].content[0].type == "output_text"
    assert [item.call_id for item in page.data[2:]] == ["call_1", "call_1"]
    assert len({item.id for item in page.data}) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", "up"),
        ("order", ""),
        ("limit", "0"),
        ("limit", "101"),
        ("limit", "-1"),
        ("limit", "9" * 5000),
        ("limit", "\u0663"),
        ("after", "msg_8_0"),
        ("after", ""),
    ],
)
def test_a_parameter_that_is_wrong_is_named(name, value):
    with pytest.raises(InvalidRequest) as caught:
        input_item_page("resp_7", [USER], {name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("background", [False, True])
async def test_only_what_is_new_is_listed(gateway, background):
    body = {"max_output_tokens": 1, "background": background}
    _, first = await gateway.post(URL, {"input": "One", **body})
    await gateway.engine.wait_until_idle()
    _, second = await gateway.post(
        URL, {"input": "Two", "previous_response_id": first["id"], "instructions": "Be.", **body}
    )
    status, page = await gateway.get(f"{URL}/{second['id']}/input_items")
    assert status == 200
    assert page == {
        "object": "list",
        "data": [
            {
                "type": "message",
                "id": f"msg_{second['id'][5:]}_0",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": "Two"}],
            }
        ],
        "first_id": f"msg_{second['id'][5:]}_0",
        "last_id": f"msg_{second['id'][5:]}_0",
        "has_more": False,
    }


async def test_of_what_is_not_there_nothing_is_listed(gateway):
    assert (await gateway.get(f"{URL}/resp_x/input_items"))[0] == 404
