"""GGUF files written by hand, so that tests can make each field wrong.

Independent of both our reader and the `gguf` package.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
SCALAR_FORMATS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: object) -> bytes:
    return string(content) if kind == STRING else struct.pack(SCALAR_FORMATS[kind], content)


def entry(key: str | bytes, kind: int, content: object) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def array_entry(key: str, kind: int, items: list, *, count: int | None = None) -> bytes:
    count = len(items) if count is None else count
    head = string(key) + struct.pack("<IIQ", ARRAY, kind, count)
    return head + b"".join(value(kind, item) for item in items)


def tensor_info(name: str, sizes: list[int], type_id: int, offset: int, *, dims=None) -> bytes:
    dims = len(sizes) if dims is None else dims
    packed = b"".join(struct.pack("<Q", size) for size in sizes)
    return string(name) + struct.pack("<I", dims) + packed + struct.pack("<IQ", type_id, offset)


@dataclass
class GGUFBytes:
    """The parts of a file; `build` joins them."""

    magic: bytes = b"GGUF"
    version: int = 3
    entries: list[bytes] = field(default_factory=list)
    infos: list[bytes] = field(default_factory=list)
    data: bytes = b""
    num_tensors: int | None = None
    num_entries: int | None = None

    def add_f32(self, name: str, array: np.ndarray) -> None:
        """Append a float32 tensor, [out, in]."""
        self.infos.append(tensor_info(name, list(reversed(array.shape)), 0, len(self.data)))
        raw = array.astype("<f4").tobytes()
        self.data += raw + b"\0" * (-len(raw) % 32)

    def build(self) -> bytes:
        num_tensors = len(self.infos) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_entries)
        head += b"".join(self.entries) + b"".join(self.infos)
        return head + b"\0" * (-len(head) % 32) + self.data


def small_llama() -> GGUFBytes:
    """A complete model: 1 layer, hidden size 8, 2 heads, 12 tokens, chat template."""
    tokens = ["<s>", "</s>", "<|im_end|>", "a", "b", "c", "ab", "d", "e", "f", "g", "h"]
    gguf = GGUFBytes(
        entries=[
            entry("general.architecture", STRING, "llama"),
            entry("llama.embedding_length", U32, 8),
            entry("llama.feed_forward_length", U32, 4),
            entry("llama.block_count", U32, 1),
            entry("llama.attention.head_count", U32, 2),
            entry("llama.attention.head_count_kv", U32, 1),
            entry("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
            entry("llama.context_length", U32, 64),
            entry("tokenizer.ggml.model", STRING, "gpt2"),
            entry("tokenizer.ggml.pre", STRING, "smollm"),
            array_entry("tokenizer.ggml.tokens", STRING, tokens),
            array_entry("tokenizer.ggml.token_type", I32, [3, 3, 3] + [1] * 9),
            array_entry("tokenizer.ggml.merges", STRING, ["a b"]),
            entry("tokenizer.ggml.bos_token_id", U32, 0),
            entry("tokenizer.ggml.eos_token_id", U32, 1),
            entry("tokenizer.ggml.eot_token_id", U32, 2),
            entry("tokenizer.ggml.add_bos_token", BOOL, True),
            entry("tokenizer.chat_template", STRING, "{{ messages[0]['content'] }}</s>"),
        ]
    )
    shapes = {
        "token_embd.weight": (12, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.ffn_gate.weight": (4, 8),
        "blk.0.ffn_up.weight": (4, 8),
        "blk.0.ffn_down.weight": (8, 4),
    }
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        gguf.add_f32(name, rng.standard_normal(shape))
    return gguf
