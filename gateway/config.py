"""What an operator can set about the gateway. The engine has its own configuration."""

import ipaddress
from dataclasses import dataclass, fields
from typing import Literal

__all__ = ["METRICS_PREFIX", "GatewayConfig", "ReasoningFormat", "ToolParserName"]

METRICS_PREFIX = "headrace"

ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_xml", "glm45"]
ReasoningFormat = Literal["auto", "think", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Addresses, limits and time-outs of one gateway.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        served_model_names: names that requests may use; the first is the one we report.
        allowed_hosts: names that the Host header may carry besides the loopback names and
            `host`, without port; "*" allows any.
        allowed_origins: web origins ("https://chat.example") whose pages may call us, besides
            pages that we serve ourselves; "*" allows any.
        metrics_prefix: "headrace", or "vllm" to export vLLM's metric names as well.

        max_body_bytes: largest HTTP body, after decompression, and largest websocket message.
        header_timeout_s: a client must send the head of its request within this time.
        body_read_timeout_s: a client must send its body within this time.
        sse_keep_alive_interval_s: silence after which a comment is sent; None never sends one.
        send_timeout_s: a client that accepts no byte for so long is disconnected.
        keepalive_timeout_s: a connection that sends no whole request for so long is closed.
        max_connections: beyond, a new connection is told 503 and closed.
        shutdown_timeout_s: at a stop, running requests may finish for so long.

        tool_call_parser: how the model writes calls of tools; "auto" reads it off the template.
        reasoning_parser: how it marks its thoughts, likewise; "none" leaves them in the text.

        response_store_bytes: responses that can be asked for again, with their conversations.

        max_n: most choices per prompt.
        max_choices: most prompts times choices in one HTTP request.
        max_stop_strings, max_stop_string_length: stop strings of a request, characters of each.
        max_concurrent_prepares: requests that may be tokenized, or wait for it, at a time.
        tokenizer_threads: threads that render templates and tokenize.

        ws_heartbeat_s: interval of websocket pings; the answer is due in half of it.
        ws_close_timeout_s: how long to wait for the other side's close frame.
        ws_max_streams: running requests per websocket.
        ws_max_messages_per_s: messages that are read from a websocket, on average; a client that
            sends more has to wait.
        ws_max_connections: websockets at a time.
        ws_idle_timeout_s: a websocket on which nothing runs for so long is closed.
        ws_max_age_s: so old, a websocket takes nothing new, and is closed once nothing runs.

        resume_ttl_s: how long a stream whose connection was lost can be resumed.
        resume_stream_bytes: output kept of one stream to send it again.
        resume_total_bytes: output kept of all streams; beyond, the longest lost are given up.
        resume_max_streams: streams that can be resumed at a time; beyond, the longest lost are
            given up, and then new ones cannot be resumed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ("default",)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    metrics_prefix: str = METRICS_PREFIX

    max_body_bytes: int = 8 * 1024 * 1024
    header_timeout_s: float = 15.0
    body_read_timeout_s: float = 30.0
    sse_keep_alive_interval_s: float | None = 15.0
    send_timeout_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    max_connections: int = 1000
    shutdown_timeout_s: float = 30.0

    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningFormat = "auto"

    response_store_bytes: int = 64 * 1024 * 1024

    max_n: int = 16
    max_choices: int = 128
    max_stop_strings: int = 16
    max_stop_string_length: int = 1024
    max_concurrent_prepares: int = 256
    tokenizer_threads: int = 2

    ws_heartbeat_s: float = 20.0
    ws_close_timeout_s: float = 3.0
    ws_max_streams: int = 32
    ws_max_messages_per_s: float = 1000.0
    ws_max_connections: int = 1024
    ws_idle_timeout_s: float = 3600.0
    ws_max_age_s: float = 86_400.0

    resume_ttl_s: float = 30.0
    resume_stream_bytes: int = 256 * 1024
    resume_total_bytes: int = 64 * 1024 * 1024
    resume_max_streams: int = 4096

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError("served_model_names must hold at least one name, none of them empty")
        if self.metrics_prefix not in (METRICS_PREFIX, "vllm"):
            raise ValueError(f"{self.metrics_prefix=} must be 'headrace' or 'vllm'")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"{self.port=} must be between 0 and 65535")
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in ("port", "shutdown_timeout_s")
            if isinstance(value, int | float) and not may_be_zero and not value > 0:
                raise ValueError(f"{field.name} must be positive, got {value!r}")
        if self.shutdown_timeout_s < 0:
            raise ValueError(f"{self.shutdown_timeout_s=} must not be negative")
        for origin in self.allowed_origins:
            if origin != "*" and ("://" not in origin or origin.count("/") != 2):
                raise ValueError(f"allowed origin {origin!r} must look like https://chat.example")

    @property
    def model_name(self) -> str:
        """The name that we report."""
        return self.served_model_names[0]

    @property
    def listens_everywhere(self) -> bool:
        """Whether `host` is a wildcard address, so that clients use names we cannot know."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return not self.host
