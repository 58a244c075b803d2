"""What calls and threads keep, computed by hand from the sizes of the native source."""

from dataclasses import replace

from kernels_pallas.native_memory import LayerSizes, call_bytes, worker_bytes

SIZES = LayerSizes(
    hidden_size=64,
    intermediate_size=128,
    vocab_size=320,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    weights="bfloat16",
    block_size=16,
    kv_cache_dtype="bfloat16",
)

# Words of 4 bytes. Queries and sums of 64 rows: 2 * 64 * 32 = 4096; scores, and
# weights in their place: 64 * 128 = 8192; totals: 64 * 16 = 1024; room for two heads: 64; 64
# pointers, for 8 blocks and 8 columns of 4: 128. Together 13,504 words, 54,016 bytes: 14 pages.
WORKER = 14 * 4096


def of_call(num_tokens, *, num_rows=10, **changes):
    return call_bytes(replace(SIZES, **changes), num_tokens=num_tokens, num_rows=num_rows)


def test_a_tile_of_attention_has_its_operands_and_sums():
    assert worker_bytes(SIZES) == WORKER


def test_without_packed_weights_no_call_keeps_anything():
    assert of_call(8192, weights=None) == 0


def test_rows_of_bfloat16_are_added_up():
    # Rows 10 * 64 * 2 = 1280, qkv 10 * 256 * 4 = 10,240, attended 10 * 128 * 2 = 2560; in the other
    # half rows 1280, and gated 10 * 128 * 2 = 2560. Together 17,920: 5 pages.
    assert of_call(10) == 5 * 4096


def test_both_halves_count():
    # 1000 tokens: 128,000 + 1,024,000 + 256,000; rows 128,000, gated 1000 * 1024 * 2 = 2,048,000.
    # Together 3,584,000: 875 pages.
    assert of_call(1000, intermediate_size=1024) == 875 * 4096


def test_rows_of_eight_bits_have_scales_and_are_rounded_from_whole_ones():
    # 10 tokens: rows 640 + 80 = 720, in lines 768; qkv 10,240; attended 1280 + 80, in lines 1408,
    # and in f32 5120. Rows 768, gated 1408 and 5120. Together 24,832: 7 pages.
    assert of_call(10, weights="int8") == 7 * 4096


def test_the_largest_logits_of_panels_may_be_more_than_a_layer_has():
    # Rows 10 * 64 * 2 = 1280; 49,152 / 32 panels of 10 rows, 8 bytes each: 122,880. 31 pages.
    assert of_call(10, vocab_size=49152) == 31 * 4096
    assert of_call(10, vocab_size=49152, num_rows=1) == 5 * 4096  # 12,416: less than a layer


def test_a_cache_that_is_decoded_or_has_narrow_blocks_takes_more():
    # K and V of 128 tokens in pairs of bfloat16: 2 * 128 * 32 / 2 words, 16,384 bytes: 70,400 in
    # all, 18 pages. float16 is decoded into float32: 32,768 bytes, 86,784 in all, 22 pages.
    assert worker_bytes(replace(SIZES, kv_cache_dtype="fp8_e4m3")) == 18 * 4096
    assert worker_bytes(replace(SIZES, kv_cache_dtype="float16")) == 22 * 4096
    # Blocks of 8: keys of a tile side by side, 128 * 16 words, and 128 pointers instead of 64:
    # 54,016 + 8192 + 512 = 62,720, 16 pages.
    assert worker_bytes(replace(SIZES, block_size=8)) == 16 * 4096


def test_heads_count_with_their_padding():
    # 40 is padded to 64: 64 rows * 2 * 64, 8192, 1024, 128, and 128 pointers of two words:
    # 8192 + 8192 + 1024 + 128 + 256 = 17,792 words, 71,168 bytes: 18 pages.
    assert worker_bytes(replace(SIZES, head_dim=40)) == 18 * 4096
