#include "int8_product.h"

#include <cstdint>
#include <memory>

#include "int8_rows.h"
#include "panels.h"
#include "tile_panels.h"
#include "tiles.h"
#include "vector_panels.h"
#include "vectors.h"

#if defined(HEADRACE_AMX) && defined(__AMX_INT8__)
#define HEADRACE_AMX_INT8 1
#endif

namespace headrace {
namespace {

using Rows = Int8Product::Rows;
using Weights = Int8Product::Weights;

// Both scales, for LANES sums of a token, from output `first` of a column on.
HEADRACE_INLINE Floats scaled(const Rows& x, const Weights& w, int64_t token, int64_t column,
                              int first, Ints sums) {
  const Floats of_token = __builtin_convertvector(sums, Floats) * x.rows.scales[token];
  return of_token * load<Floats>(w.scales + column * COLUMN + first);
}

#if defined(HEADRACE_AMX_INT8)

struct Tiles {
  using Number = int8_t;
  using Sum = int32_t;
  static constexpr int DEPTH = Int8Product::DEPTH;

  static HEADRACE_INLINE void add_above_left() { _tile_dpbssd(0, 4, 6); }
  static HEADRACE_INLINE void add_above_right() { _tile_dpbssd(1, 4, 7); }
  static HEADRACE_INLINE void add_below_left() { _tile_dpbssd(2, 5, 6); }
  static HEADRACE_INLINE void add_below_right() { _tile_dpbssd(3, 5, 7); }

  // In the place of the sums.
  const float* floats(int64_t token, int64_t rows, const int64_t* columns, int32_t* sums) const {
    float* to = (float*)sums;
    for (int64_t row = 0; row < rows; ++row)
      for (int i = 0; i < WIDTH; i += LANES) {
        const int64_t at = row * WIDTH + i;
        const Floats numbers =
            scaled(x, w, token + row, columns[i / COLUMN], i % COLUMN, load<Ints>(sums + at));
        store(to + at, numbers);
      }
    return to;
  }

  Rows x;
  Weights w;
};

#endif

// What vectors of four numbers in each lane can do. `Left` is made of weights, `Right` of a word
// of a row, for all lanes; `begin` is what the sums of a row begin with.

#if (defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))) && \
    !defined(HEADRACE_NO_VNNI)

// The instruction multiplies bytes without signs by those with: 128 is added to the weights, and
// what that adds to the sums taken away beforehand.
struct Dot {
  struct Left {
    Words numbers;
    explicit HEADRACE_INLINE Left(Words weights) : numbers(weights ^ 0x80808080u) {}
  };
  struct Right {
    Words numbers;
    explicit HEADRACE_INLINE Right(uint32_t word) : numbers(all_bits(word)) {}
  };
  static HEADRACE_INLINE Ints begin(int32_t row_sum) { return Ints{} - 128 * row_sum; }
  static HEADRACE_INLINE Ints add(Ints sums, const Left& left, const Right& right) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)left.numbers, (__m512i)right.numbers);
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)left.numbers,
                                         (__m256i)right.numbers);
#endif
  }
};

#elif defined(__x86_64__) && (!defined(__AVX512F__) || defined(__AVX512BW__))

// Every second number as one of sixteen bits; pairs of these are multiplied and added.
struct Dot {
  typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
  struct Halved {
    Shorts even, odd;
    explicit HEADRACE_INLINE Halved(Words words)
        : even((Shorts)((Shorts)words << 8) >> 8), odd((Shorts)words >> 8) {}
  };
  using Left = Halved;
  struct Right : Halved {
    explicit HEADRACE_INLINE Right(uint32_t word) : Halved(all_bits(word)) {}
  };
  static HEADRACE_INLINE Ints begin(int32_t) { return Ints{}; }
  static HEADRACE_INLINE Ints add(Ints sums, const Left& left, const Right& right) {
    return sums + pairs(left.even, right.even) + pairs(left.odd, right.odd);
  }
  static HEADRACE_INLINE Ints pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
  }
};

#else

struct Dot {
  struct Each {
    Ints numbers[WORD];
    explicit HEADRACE_INLINE Each(Words words) {
      for (int i = 0; i < WORD; ++i) numbers[i] = (Ints)(words << (24 - 8 * i)) >> 24;
    }
  };
  using Left = Each;
  struct Right : Each {
    explicit HEADRACE_INLINE Right(uint32_t word) : Each(all_bits(word)) {}
  };
  static HEADRACE_INLINE Ints begin(int32_t) { return Ints{}; }
  static HEADRACE_INLINE Ints add(Ints sums, const Left& left, const Right& right) {
    for (int i = 0; i < WORD; ++i) sums += left.numbers[i] * right.numbers[i];
    return sums;
  }
};

#endif

struct Vectors : Dot {
  using Number = int8_t;
  using Sums = Ints;
  static constexpr bool HAS_CODES = false;

  Ints begin(int64_t token) const { return Dot::begin(x.rows.sums[token]); }
  Floats floats(int64_t token, int64_t column, int first, Ints sums) const {
    return scaled(x, w, token, column, first, sums);
  }

  Rows x;
  Weights w;
};

}  // namespace

std::unique_ptr<Multiplying> Int8Product::new_multiplying(const Rows& x, const Weights& w,
                                                          int64_t tokens) {
#if defined(HEADRACE_AMX_INT8)
  if (may_use_tiles()) return std::make_unique<TilePanels<Tiles>>(Tiles{x, w}, tokens);
#endif
  return std::make_unique<VectorPanels<Vectors>>(Vectors{{}, x, w});
}

}  // namespace headrace
