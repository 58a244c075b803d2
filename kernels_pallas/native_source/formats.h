// How the cache stores a number: encoding for the write, decoding for the products.
//
// A format says which products it takes part in. For those in bfloat16 the order inside a block
// keeps pairs of what is summed over together, as the instructions for bfloat16 want their
// operands: K is [H / 2][tokens][2], V is [tokens / 2][H][2]. For those in float32 K is
// [H][tokens] and V is [tokens][H].
//
// Decoding is total: every pattern of bits is a finite number.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

namespace headrace {

HEADRACE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

HEADRACE_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// What is not a number counts as zero, what is out of range as the largest number.
HEADRACE_INLINE float within(float x, float largest) {
  x = x == x ? x : 0.0f;
  x = x > largest ? largest : x;
  return x < -largest ? -largest : x;
}

HEADRACE_INLINE uint16_t bfloat16_of(float x) {
  const uint32_t bits = bits_of(x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

HEADRACE_INLINE float float_of_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

// A float with fewer bits. BIAS is what the format adds to exponents.
template <int MANTISSA, int BIAS>
HEADRACE_INLINE uint32_t encode_small(float x) {
  const uint32_t sign = bits_of(x) >> 31;
  const float magnitude = std::fabs(x);
  constexpr int DROPPED = 23 - MANTISSA;
  const uint32_t bits = bits_of(magnitude);
  const uint32_t rounded = (bits + (1u << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED;
  const uint32_t normal = rounded - ((127 - BIAS) << MANTISSA);
  // Below the smallest normal number: so many of the smallest steps.
  const float steps = magnitude * (float)(1u << (BIAS - 1 + MANTISSA));
  const uint32_t subnormal = bits_of(steps + 8388608.0f) & 0x7fffff;
  const float smallest_normal = 1.0f / (1u << (BIAS - 1));
  constexpr int SIGN_BIT = MANTISSA == 10 ? 15 : 7;
  return (magnitude < smallest_normal ? subnormal : normal) | sign << SIGN_BIT;
}

// Without subnormal floats on the way, which the processor may be told to flush.
template <int MANTISSA, int BIAS>
HEADRACE_INLINE Floats decode_small(Words bits, uint32_t largest) {
  constexpr int SIGN_BIT = MANTISSA == 10 ? 15 : 7;
  constexpr int DROPPED = 23 - MANTISSA;
  const Words all_but_sign = bits & ((1u << SIGN_BIT) - 1);
  const Words magnitude = all_but_sign > largest ? all_bits(largest) : all_but_sign;
  const Words shifted = magnitude << DROPPED;
  const Floats normal = (Floats)(shifted + ((127u - BIAS) << 23));
  const float smallest_normal = 1.0f / (1u << (BIAS - 1));
  const Floats subnormal = (Floats)(shifted + ((128u - BIAS) << 23)) - smallest_normal;
  const Floats value = magnitude < (1u << MANTISSA) ? subnormal : normal;
  return (Floats)((Words)value | ((bits >> SIGN_BIT) << 31));
}

// Pairs: two neighbouring bfloat16 make one word, the first in the lower half.
template <class Decode>
HEADRACE_INLINE void decode_to_pairs(uint32_t* to, int64_t count, Decode decode) {
  for (int64_t i = 0; i < count; i += LANES) {
    const Words upper = (Words)decode(i) >> 16;  // exact: the lower halves are zero
    store((uint16_t*)to + i, __builtin_convertvector(upper, Halves));
  }
}

struct Float32 {
  using Stored = float;
  static constexpr bool PAIRS = false, SCALED = false;
  static Stored encode(float x) { return within(x, std::numeric_limits<float>::max()); }
  static constexpr auto decode = nullptr;
};

struct Bfloat16 {
  using Stored = uint16_t;
  static constexpr bool PAIRS = true, SCALED = false;
  static Stored encode(float x) { return bfloat16_of(within(x, float_of(0x7f7f0000))); }
  static constexpr auto decode = nullptr;
};

struct Float16 {
  using Stored = uint16_t;
  static constexpr bool PAIRS = false, SCALED = false;
  static Stored encode(float x) { return encode_small<10, 15>(within(x, 65504.0f)); }
  static void decode(const void* stored, uint32_t* to, int64_t count) {
    const Stored* from = (const Stored*)stored;
    for (int64_t i = 0; i < count; i += LANES) {
      const Words bits = __builtin_convertvector(load<Halves>(from + i), Words);
      store(to + i, decode_small<10, 15>(bits, 0x7bff));
    }
  }
};

template <int MANTISSA, int BIAS, uint32_t LARGEST_BITS, int LARGEST>
struct Float8 {
  using Stored = uint8_t;
  static constexpr bool PAIRS = true, SCALED = false;
  static Stored encode(float x) { return encode_small<MANTISSA, BIAS>(within(x, (float)LARGEST)); }
  static void decode(const void* stored, uint32_t* to, int64_t count) {
    const Stored* from = (const Stored*)stored;
    decode_to_pairs(to, count, [&](int64_t i) {
      const Words bits = __builtin_convertvector(load<Bytes>(from + i), Words);
      return decode_small<MANTISSA, BIAS>(bits, LARGEST_BITS);
    });
  }
};

using Float8E4m3 = Float8<3, 7, 0x7e, 448>;
using Float8E5m2 = Float8<2, 15, 0x7b, 57344>;

struct Int8 {
  using Stored = int8_t;
  static constexpr bool PAIRS = true, SCALED = true;
  // One scale for a whole key or value; rounded before it divides, so its precision costs nothing.
  static uint16_t scale_of(float largest) { return bfloat16_of(largest / 127.0f); }
  static Stored encode(float x, float scale) {
    const float steps = scale > 0.0f ? std::nearbyint(x / scale) : 0.0f;
    return (Stored)within(steps, 127.0f);
  }
  static void decode(const void* stored, uint32_t* to, int64_t count) {
    const Stored* from = (const Stored*)stored;
    decode_to_pairs(to, count, [&](int64_t i) {
      const Ints steps = __builtin_convertvector(load<SignedBytes>(from + i), Ints);
      return __builtin_convertvector(steps, Floats);
    });
  }
};

// What reading the cache has to know of its format.
struct Reading {
  int bytes;  // of a number
  bool scaled;
  // Makes the operand of a product of stored numbers; null if they are one already.
  void (*decode)(const void* from, uint32_t* to, int64_t count);
};

template <class Format>
constexpr Reading reading_of() {
  return {sizeof(typename Format::Stored), Format::SCALED, Format::decode};
}

}  // namespace headrace
