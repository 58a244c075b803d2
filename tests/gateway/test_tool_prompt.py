import json

from gateway.text_codec import ChatMessage, MessageCall
from gateway.tool_prompt import with_tools_in_words

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SYSTEM = ChatMessage(role="system", content="Be brief.")
USER = ChatMessage(role="user", content="Rain?")
ASKING = ChatMessage(
    role="assistant",
    content="I look.",
    tool_calls=(
        MessageCall(id="1", name="weather", arguments='{"city": "Paris"}'),
        MessageCall(id="2", name="clock", arguments=""),
    ),
)
RESULTS = (
    ChatMessage(role="tool", content="sun", tool_call_id="1"),
    ChatMessage(role="tool", content="noon", tool_call_id="2"),
)


def test_a_conversation_without_tools_stays_as_it_is():
    assert with_tools_in_words([SYSTEM, USER], []) == (SYSTEM, USER)


def test_definitions_are_in_the_first_message():
    [system, user] = with_tools_in_words([USER], [TOOL])
    assert system.role == "system"
    assert json.dumps(TOOL) in system.content.splitlines()
    assert user == USER


def test_the_system_keeps_its_own_words():
    [system, user] = with_tools_in_words([SYSTEM, USER], [TOOL])
    assert system.content.startswith("Be brief.\n\n")
    assert json.dumps(TOOL) in system.content
    assert user == USER


def test_calls_and_results_become_turns_that_take_turns():
    told = with_tools_in_words([USER, ASKING, *RESULTS, USER], [])
    assert [message.role for message in told] == ["user", "assistant", "user", "user"]
    assert told[1].tool_calls == ()
    assert told[1].content == (
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    )
    assert told[2].content == (
        "<tool_response>\nsun\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
