// Weights as their file has them, beside the same numbers in bfloat16: codes of four or eight bits
// in groups of inputs, with a scale and a minimum for each output of a group. A weight is
//
//     bfloat16(scale * code + minimum)
//
// rounded twice, to float32 and then to bfloat16, as whoever widened the weights has done: the bits
// are the same. Codes of a few tokens' product come from memory in a quarter or half of the time;
// with more tokens the products take longer than that, and widening would come on top.
//
// Packed, they are [outputs / 16][inputs / 32][5 or 9 lines][64 bytes]: the codes of a group, and
// then sixteen scales and sixteen minima in float16. What makes a word of weights lies in pieces of
// sixteen: two inputs, one after the other, of the first eight outputs, and then of the others.
//
// * Codes of four bits are 0 to 15. Bits 4n to 4n + 3 of the sixteen words of a line are piece n.
// * Codes of eight bits are -128 to 127, piece by piece.
#pragma once

#include <cstdint>

#include "ahead.h"
#include "vectors.h"

namespace headrace {

constexpr int GROUP = 32;  // inputs
constexpr int LINES_OF_4_BITS = 5, LINES_OF_8_BITS = 9;

// Of one product; `lines` is 0 if there are none.
struct Codes {
  const uint8_t* codes = nullptr;
  int64_t lines = 0;  // of a group
};

#if defined(__AVX512F__) && defined(__AVX512BF16__)

// A group of one column. What is widened of it is spread over the two halves of the outputs.
template <int BITS>
class CodedGroup {
 public:
  static constexpr int LINES = BITS == 4 ? LINES_OF_4_BITS : LINES_OF_8_BITS;
  static constexpr int BYTES = LINES * LINE_BYTES;

  explicit HEADRACE_INLINE CodedGroup(const char* group) : group_(group) {
    const char* last = group + (LINES - 1) * LINE_BYTES;
    const __m512 scales = _mm512_cvtph_ps(load<__m256i>(last));
    const __m512 minima = _mm512_cvtph_ps(load<__m256i>(last + LINE_BYTES / 2));
    const __m512i lanes = (__m512i)(lane_numbers() >> 1);
    HEADRACE_UNROLL for (int half = 0; half < 2; ++half) {
      const __m512i twice = _mm512_add_epi32(lanes, _mm512_set1_epi32(8 * half));
      scales_[half] = (Floats)_mm512_permutexvar_ps(twice, scales);
      minima_[half] = (Floats)_mm512_permutexvar_ps(twice, minima);
    }
  }

  // Words that are best asked for together, by loops that are unrolled.
  static constexpr int TOGETHER = 4;

  // A word of sixteen outputs' weights: `word` of the TOGETHER from `first` on.
  HEADRACE_INLINE Words weights(int first, int word) const {
    const char* line = group_ + first / TOGETHER * LINE_BYTES * BITS / 4;
    const __m512 left = (__m512)multiply_add(code(line, 2 * word), scales_[0], minima_[0]);
    const __m512 right = (__m512)multiply_add(code(line, 2 * word + 1), scales_[1], minima_[1]);
    return (Words)_mm512_cvtne2ps_pbh(right, left);
  }

 private:
  static HEADRACE_INLINE Floats code(const char* line, int piece) {
    if constexpr (BITS == 4) {
      // Looked up by its lowest four bits.
      const __m512 numbers = (__m512)__builtin_convertvector(lane_numbers(), Floats);
      const Words of_line = load<Words>(line);
      return (Floats)_mm512_permutexvar_ps((__m512i)(of_line >> (piece * 4)), numbers);
    } else {
      const SignedBytes codes = load<SignedBytes>(line + piece * LANES);
      return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
    }
  }

  const char* group_;
  Floats scales_[2], minima_[2];
};

#endif

}  // namespace headrace
