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
    golden = {"templates": TEMPLATES, "cases": cases}
    (GOLDEN_DIR / "chat_templates.json").write_text(
        json.dumps(golden, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
