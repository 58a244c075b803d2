"""Make chat_templates.json: conversations rendered and tokenized by transformers.

Run as ``python make_chat_templates.py`` in the environment of make_golden.py, after it. The
templates are our own and each uses something that published ones use: trimming, a first token,
roles that must alternate, a chain of thought that is cut out of earlier answers, JSON, loop
controls, the mark of generated text, and macros.
"""

import json
from pathlib import Path

from transformers import AutoTokenizer

GOLDEN_DIR = Path(__file__).parent

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] "
        "+ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "default system line": (
        "{%- if messages[0]['role'] != 'system' -%}\n"
        "    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}\n"
        "{%- endif -%}\n"
        "{%- for m in messages -%}\n"
        "    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n"
    ),
    "trim": (
        "{{ bos_token }}\n"
        "{% for m in messages %}\n"
        "    {% if m.content | trim %}\n"
        "[{{ m.role | upper }}] {{ m.content | trim }}{{ eos_token }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
    ),
    "alternate": (
        "{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user and assistant') }}"
        "{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'].strip() + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "cut thoughts": (
        "{%- for m in messages %}\n"
        "{%- set text = m.content %}\n"
        "{%- if m.role == 'assistant' and '</think>' in text %}\n"
        "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}\n"
        "{%- endif %}\n"
        "{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n"
    ),
    "json and loop controls": (
        "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}"
        "{{ m | tojson }}{{ eos_token }}{% endfor %}"
    ),
    "generation mark": (
        "{% for m in messages %}<|im_start|>"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    ),
    "macro and namespace": (
        "{% macro turn(role, text) %}<|im_start|>{{ role }}\n{{ text }}<|im_end|>{% endmacro %}"
        "{% set ns = namespace(count=0) %}"
        "{% for m in messages %}{% set ns.count = ns.count + 1 %}{{ turn(m.role, m.content) }}"
        "{% endfor %}{{ ns.count }}{{ tools is none }}"
    ),
}
CONVERSATIONS = [
    [("user", "Hi")],
    [("system", "Sei nett."), ("user", "Größe?\n日本"), ("assistant", "ja"), ("user", "ok")],
    [("user", "  space around \n"), ("assistant", "\tanswer "), ("user", "\n\nmore\n\n")],
    [("user", "a"), ("assistant", "<think>\nlong\n</think>\n\nshort"), ("user", "b")],
    [("user", ""), ("assistant", " "), ("user", "x")],
    [("user", '{"quotes": \'\\"\'}, <b>&amp;</b> {{ x }} {% y %}')],
]
# How published templates tell of tools: as JSON of several shapes, with calls in the assistant's
# turns and results in turns of their own.
TOOL_TEMPLATES = {
    "marked calls": (
        "{%- if tools %}\n"
        "    {{- '<|im_start|>system\\nTools:' }}\n"
        "    {%- for tool in tools %}\n"
        "        {{- '\\n' }}{{- tool | tojson }}\n"
        "    {%- endfor %}\n"
        "    {{- '<|im_end|>\\n' }}\n"
        "{%- endif %}\n"
        "{%- for m in messages %}\n"
        "    {{- '<|im_start|>' + m.role }}\n"
        "    {%- if m.content %}{{- '\\n' + m.content }}{%- endif %}\n"
        "    {%- for call in m.tool_calls or [] %}\n"
        "        {%- set call = call.function %}\n"
        '        {{- \'\\n<call>{"name": "\' + call.name + \'", "arguments": \' }}\n'
        "        {{- call.arguments | tojson }}{{- '}</call>' }}\n"
        "    {%- endfor %}\n"
        "    {{- '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n"
    ),
    "indented definitions, one call, results as JSON": (
        "{{ bos_token }}{% if tools is not none %}{% for t in tools %}"
        "{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
        "{% for m in messages %}{% if 'tool_calls' in m %}"
        "{{ m.tool_calls[0].function | tojson(ensure_ascii=True, sort_keys=True) }}{{ eos_token }}"
        "{% elif m.role == 'tool' %}[{{ m.tool_call_id }}]{{ m.content | tojson }}{{ eos_token }}"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says <b>"rain"</b> or sun.\nEverywhere, also in 東京.',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "Oslo"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    }
]
TOOL_CONVERSATION = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "123456789",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": {"days": [1, 2], "city": "Zürich", "none": None, "half": 0.5},
                },
            }
        ],
    },
    {"role": "tool", "content": 'sun & "wind"\nÜ', "tool_call_id": "123456789"},
    {"role": "assistant", "content": "Sun."},
]


def main() -> None:
    """Render and tokenize every conversation with every template."""
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN_DIR / "tiny" / "llama")
    cases = []
    for name, template in TEMPLATES.items():
        for conversation in CONVERSATIONS:
            messages = [{"role": role, "content": content} for role, content in conversation]
            for prompt in (True, False):
                case = {"template": name, "messages": messages, "add_generation_prompt": prompt}
                options = {"chat_template": template, "add_generation_prompt": prompt}
                try:
                    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
                except Exception as error:
                    cases.append(case | {"error": str(error)})
                    continue
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                cases.append(case | {"text": text, "ids": ids})
    tool_cases = []
    for name, template in TOOL_TEMPLATES.items():
        for tools in (TOOLS, None):
            text = tokenizer.apply_chat_template(
                TOOL_CONVERSATION, tools=tools, tokenize=False, chat_template=template
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            tool_cases.append({"template": name, "tools": tools, "text": text, "ids": ids})
    golden = {
        "templates": TEMPLATES,
        "cases": cases,
        "tool_templates": TOOL_TEMPLATES,
        "tool_conversation": TOOL_CONVERSATION,
        "tool_cases": tool_cases,
    }
    (GOLDEN_DIR / "chat_templates.json").write_text(
        json.dumps(golden, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
