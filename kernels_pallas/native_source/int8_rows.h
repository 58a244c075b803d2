// Rows of activations as integers of eight bits, as kernels_pallas/int8.py defines them.
//
// A row is rotated, sixty-four numbers at a time, by the Hadamard matrix: sums and differences of
// numbers 32 apart, then 16, ... 1. It is then divided by its largest magnitude / 127, and rounded
// to the nearest, ties to even. The same order, and no operation joined with another: the same bits
// as in XLA.
#pragma once

#include <cstdint>
#include <limits>

#include "formats.h"
#include "vectors.h"

namespace headrace {

// Numbers that are rotated together.
constexpr int ROTATED = 64;

// Lanes whose numbers differ in one bit change places.
template <int DISTANCE>
HEADRACE_INLINE Floats exchange_lanes(Floats x) {
#if defined(__clang__)
  Floats result;
  for (int lane = 0; lane < LANES; ++lane) result[lane] = x[lane ^ DISTANCE];
  return result;
#else
  return __builtin_shuffle(x, (Ints)(lane_numbers() ^ DISTANCE));
#endif
}

// The sum with the lane DISTANCE further, and in that lane the difference to it.
template <int DISTANCE>
HEADRACE_INLINE Floats add_lanes(Floats x) {
  const Words is_second = (lane_numbers() & DISTANCE) != 0;
  const Floats turned = (Floats)((Words)x ^ (is_second & 0x80000000u));
  return exchange_lanes<DISTANCE>(x) + turned;
}

HEADRACE_INLINE void rotate(const float* from, float* to) {
  constexpr int VECTORS = ROTATED / LANES;
  Floats x[VECTORS];
  HEADRACE_UNROLL for (int i = 0; i < VECTORS; ++i) x[i] = load<Floats>(from + i * LANES);
  HEADRACE_UNROLL for (int distance = VECTORS / 2; distance > 0; distance /= 2)
    HEADRACE_UNROLL for (int i = 0; i < VECTORS; ++i)
      if ((i & distance) == 0) {
        const Floats first = x[i], second = x[i + distance];
        x[i] = first + second;
        x[i + distance] = first - second;
      }
  HEADRACE_UNROLL for (int i = 0; i < VECTORS; ++i) {
    if constexpr (LANES > 8) x[i] = add_lanes<8>(x[i]);
    if constexpr (LANES > 4) x[i] = add_lanes<4>(x[i]);
    x[i] = add_lanes<2>(x[i]);
    x[i] = add_lanes<1>(x[i]);
    store(to + i * LANES, x[i]);
  }
}

// Where rounded rows are, and what undoes the division: the scale holds that of the rotation too.
struct RoundedRows {
  int8_t* numbers;
  float* scales;
  int32_t* sums;  // of the integers of a row
};

// A row that is not finite gets zeros, and a scale that is not a number.
inline void round_row(const float* x, int64_t inputs, float* rotated, int8_t* numbers, float& scale,
                      int32_t& sum) {
  Words largest = all_bits(0);
  for (int64_t block = 0; block < inputs; block += ROTATED) {
    rotate(x + block, rotated + block);
    for (int i = 0; i < ROTATED; i += LANES) {
      const Words magnitude = load<Words>(rotated + block + i) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; ++lane) bits = largest[lane] > bits ? largest[lane] : bits;
  const bool finite = bits < 0x7f800000;
  const float magnitude = finite && float_of(bits) > 1e-30f ? float_of(bits) : 1e-30f;
  scale = finite ? magnitude * (float)(1.0 / (127 * 8)) : std::numeric_limits<float>::quiet_NaN();
  const Floats inverse = all(finite ? 127.0f / magnitude : 0.0f);
  const Words number_bits = all_bits(finite ? 0xff : 0);
  // Of numbers up to 2^22 the sum has no bits left for fractions: its lowest byte is the integer.
  const float round_to_integer = 12582912.0f;
  Ints total = {};
  for (int64_t i = 0; i < inputs; i += LANES) {
    const Words rounded = (Words)(load<Floats>(rotated + i) * inverse + round_to_integer);
    store(numbers + i, __builtin_convertvector(rounded & number_bits, Bytes));
    total += (Ints)(rounded - 0x4b400000u);
  }
  sum = 0;
  if (finite)
    for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
}

}  // namespace headrace
