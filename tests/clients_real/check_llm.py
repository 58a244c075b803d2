"""The `llm` command."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks

checks = Checks("llm", "openai")
folder = tempfile.TemporaryDirectory()
Path(folder.name, "extra-openai-models.yaml").write_text(
    f"""
- model_id: chat
  model_name: {checks.model}
  api_base: {checks.url}/v1
- model_id: complete
  model_name: {checks.model}
  api_base: {checks.url}/v1
  completion: true
- model_id: structured
  model_name: {checks.model}
  api_base: {checks.url}/v1
  supports_schema: true
""",
    encoding="utf-8",
)
QUESTION = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def llm(*arguments):
    environment = {**os.environ, "LLM_USER_PATH": folder.name, "OPENAI_API_KEY": "none"}
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@checks.add()
def streamed():
    """A streamed answer"""
    answer = llm("-m", "chat", "-o", "temperature", "0", "-o", "max_tokens", "24", QUESTION)
    assert checks.is_answer(answer.strip())


@checks.add()
def whole():
    """A whole answer, with a system prompt"""
    answer = llm(
        *("-m", "chat", "--no-stream", "-s", "You answer briefly."),
        *("-o", "temperature", "0", "-o", "max_tokens", "24", QUESTION),
    )
    assert answer.strip()


@checks.add()
def conversation():
    """A conversation that goes on"""
    assert llm("-c", "-m", "chat", "-o", "max_tokens", "16", "And of Italy?").strip()


@checks.add()
def completion():
    """A completion model"""
    assert llm("-m", "complete", "-o", "max_tokens", "4", "One, two, three,").strip()


@checks.add()
def logged():
    """Its log has the token counts of chats; it does not ask for those of completions"""
    entries = json.loads(llm("logs", "list", "--json", "-n", "0", "-m", "chat"))
    assert entries
    assert all(entry["input_tokens"] and entry["output_tokens"] for entry in entries)


@checks.add(needs="response_format")
def structured():
    """A schema"""
    answer = llm(
        *("-m", "structured", "--schema", json.dumps(SCHEMA)),
        *("-o", "temperature", "0", "-o", "max_tokens", "128", QUESTION),
    )
    assert "city" in json.loads(answer)


checks.run()
