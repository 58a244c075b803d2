// Vectors of the machine's own width, in the compiler's portable extension, and what C++ has no
// operator for. Every operation rounds the same whatever the optimizer does: multiply-adds are
// written out, and the build forbids it to fuse others.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace headrace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

#define HEADRACE_ALWAYS_INLINE __attribute__((always_inline))
#define HEADRACE_INLINE inline HEADRACE_ALWAYS_INLINE
// Before a loop over vectors that have to stay in registers: the compiler leaves those in memory
// whose place it knows only while the loop runs.
#define HEADRACE_UNROLL _Pragma("GCC unroll 16")

template <class Vector>
HEADRACE_INLINE Vector load(const void* from) {
  Vector result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

template <class Vector>
HEADRACE_INLINE void store(void* to, Vector value) {
  std::memcpy(to, &value, sizeof value);
}

HEADRACE_INLINE Floats all(float x) { return Floats{} + x; }
HEADRACE_INLINE Words all_bits(uint32_t x) { return Words{} + x; }

HEADRACE_INLINE Words lane_numbers() {
  Words result;
  for (int lane = 0; lane < LANES; ++lane) result[lane] = lane;
  return result;
}

// a * b + c, rounded once where the machine can.
HEADRACE_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The second if either is not a number.
HEADRACE_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

HEADRACE_INLINE float largest_lane(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float result = x[0];
  for (int lane = 1; lane < LANES; ++lane) result = x[lane] > result ? x[lane] : result;
  return result;
#endif
}

// Where `value` is first, of so many vectors' numbers; 0 if it is not there.
HEADRACE_INLINE int first_equal(const float* x, int count, float value) {
  for (int i = 0; i < count; i += LANES) {
#if defined(__AVX512F__)
    const unsigned equal = _mm512_cmpeq_ps_mask(_mm512_loadu_ps(x + i), _mm512_set1_ps(value));
    if (equal != 0) return i + __builtin_ctz(equal);
#else
    for (int lane = 0; lane < LANES; ++lane)
      if (x[i + lane] == value) return i + lane;
#endif
  }
  return 0;
}

HEADRACE_INLINE float sum_of_lanes(Floats x) {
  float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// What is not a number counts as zero, what is infinite as the largest number.
HEADRACE_INLINE Floats finite(Floats x) {
  constexpr float LARGEST = 3.40282347e38f;
  x = x == x ? x : all(0.0f);
  x = x > LARGEST ? all(LARGEST) : x;
  return x < -LARGEST ? all(-LARGEST) : x;
}

// The nearest bfloat16, ties to even, as the lower half of each word. Finite numbers only.
HEADRACE_INLINE Words round_to_bfloat16(Floats x) {
  const Words bits = (Words)x;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

constexpr float ROUND_TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: a sum has no bits for fractions

// e ** x for x <= 0, within two units in the last place; 1 exactly at 0, and 0 below -87, where
// the result would no longer be normal.
HEADRACE_INLINE Floats exponential(Floats x) {
  const Floats clamped = larger(x, all(-87.0f));
  const Floats shifted = multiply_add(clamped, all(1.44269504f), all(ROUND_TO_INTEGER));
  const Floats n = shifted - ROUND_TO_INTEGER;
  // ln 2 in two parts; the first has few enough bits for n times it to be exact.
  Floats r = multiply_add(n, all(-0.693359375f), clamped);
  r = multiply_add(n, all(2.12194440e-4f), r);
  // Taylor's series: |r| <= 0.35, so the first term left out is below 2^-27.
  Floats sum = all(1.0f / 5040);
  sum = multiply_add(sum, r, all(1.0f / 720));
  sum = multiply_add(sum, r, all(1.0f / 120));
  sum = multiply_add(sum, r, all(1.0f / 24));
  sum = multiply_add(sum, r, all(1.0f / 6));
  sum = multiply_add(sum, r, all(0.5f));
  sum = multiply_add(sum, r, all(1.0f));
  sum = multiply_add(sum, r, all(1.0f));
  // The lowest bits of `shifted` are n: move them into the exponent.
  const Floats result = (Floats)((Words)sum + ((Words)shifted << 23));
  return x < -87.0f ? all(0.0f) : result;
}

// 2 ** x for x <= 0, within two units in the last place; 1 exactly at 0, and nothing that counts
// where the result would not be normal.
HEADRACE_INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512DQ__)
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  x = larger(x, all(-127.0f));
  const Floats shifted = x + ROUND_TO_INTEGER;
  const Floats r = x - (shifted - ROUND_TO_INTEGER);
#endif
  // Taylor's series of e ** (r * ln 2): |r| <= 1/2, so the first term left out is below 2^-22.
  Floats sum = all(1.54035304e-4f);
  sum = multiply_add(sum, r, all(1.33335581e-3f));
  sum = multiply_add(sum, r, all(9.61812911e-3f));
  sum = multiply_add(sum, r, all(5.55041087e-2f));
  sum = multiply_add(sum, r, all(2.40226507e-1f));
  sum = multiply_add(sum, r, all(6.93147181e-1f));
  sum = multiply_add(sum, r, all(1.0f));
#if defined(__AVX512DQ__)
  return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)(x - r));
#else
  return (Floats)((Words)sum + ((Words)shifted << 23));
#endif
}

// x / (1 + e ** -x)
HEADRACE_INLINE Floats silu(Floats x) {
  const Floats e = exponential(x < 0.0f ? x : -x);  // so that it cannot overflow
  return x * ((x < 0.0f ? e : all(1.0f)) / (1.0f + e));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) = x / (1 + e ** (-2 * ...))
HEADRACE_INLINE Floats gelu(Floats x) {
  const Floats inner = (x + 0.044715f * x * x * x) * 1.5957691f;
  const Floats e = exponential(inner < 0.0f ? inner : -inner);
  return x * ((inner < 0.0f ? e : all(1.0f)) / (1.0f + e));
}

// cap * tanh(x / cap), within some units in the last place of the cap.
HEADRACE_INLINE Floats capped(Floats x, float cap) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats e = exponential(size * (-2.0f / cap));
  const Floats result = cap * (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -result : result;
}

}  // namespace headrace
