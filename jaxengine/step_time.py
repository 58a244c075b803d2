"""Stub of the lead, to be overwritten."""
from typing import NamedTuple


class StepWork(NamedTuple):
    num_tokens: int
    num_seqs: int
    decode_only: bool
    decode_context: int
    prefill_context: int
    num_sampled: int
class StepTimeModel:
    def predict(self, work): return 0.0
    def observe(self, work, duration_s): return 0.0
    def most_prefill_tokens(self, limit_s, work, *, first_position, at_most): return at_most
