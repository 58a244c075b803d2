// The products of the attention: out[rows][columns] (+)= left[rows][steps] * right[steps][columns].
//
// The right operand lies in blocks of the cache. A column is LANES numbers wide;
// right[b * columns + c] is where its numbers of block b begin, those of the next step are
// `right_stride` words further. Steps are taken in order, block by block, one after the other into
// the same sum: whichever rows are computed together, each has the same bits. Each line that is
// read of the right operand is a moment to ask for another one of those ahead.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ahead.h"
#include "tiles.h"
#include "vectors.h"

#if defined(__AVX512BF16__) && !defined(HEADRACE_NO_BF16)
#define HEADRACE_AVX512_BF16 1
#endif

namespace headrace {

// Rows and columns whose sums fit into the registers, with some of what is multiplied.
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 6, COLUMNS_AT_ONCE = 4;
#elif defined(__aarch64__)
constexpr int ROWS_AT_ONCE = 4, COLUMNS_AT_ONCE = 4;
#else
constexpr int ROWS_AT_ONCE = 4, COLUMNS_AT_ONCE = 2;
#endif

// A word of the right operand holds PER_WORD numbers, of as many steps of the sum. The left operand
// is written by `put`, LANES numbers of a row at a time or twice as many; for each word on the
// right it has LEFT_WORDS.
struct FloatProduct {
  static constexpr int PER_WORD = 1, LEFT_WORDS = 1;
  static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x) { store(row + first, x); }
  static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x, Floats then) {
    put(row, first, x), put(row, first + LANES, then);
  }
  static constexpr int64_t row_words(int64_t numbers) { return numbers; }

  struct Right {
    Floats x;
    explicit HEADRACE_INLINE Right(const uint32_t* from) : x(load<Floats>(from)) {}
  };
  static HEADRACE_INLINE Floats add(Floats sum, const uint32_t* left, const Right& right) {
    return multiply_add(all(float_of_word(left[0])), right.x, sum);
  }
  static HEADRACE_INLINE float float_of_word(uint32_t word) {
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
};

// Pairs of bfloat16 without instructions for them: two float32 each. The left operand is rounded
// to bfloat16 and kept in float32.
struct PortablePairProduct {
  static constexpr int PER_WORD = 2, LEFT_WORDS = 2;
  static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x) {
    store(row + first, round_to_bfloat16(x) << 16);
  }
  static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x, Floats then) {
    put(row, first, x), put(row, first + LANES, then);
  }
  static constexpr int64_t row_words(int64_t numbers) { return numbers; }

  struct Right {
    Floats first, second;
    explicit HEADRACE_INLINE Right(const uint32_t* from) {
      const Words pairs = load<Words>(from);
      first = (Floats)(pairs << 16);
      second = (Floats)(pairs & 0xffff0000u);
    }
  };
  static HEADRACE_INLINE Floats add(Floats sum, const uint32_t* left, const Right& right) {
    sum = multiply_add(all(FloatProduct::float_of_word(left[0])), right.first, sum);
    return multiply_add(all(FloatProduct::float_of_word(left[1])), right.second, sum);
  }
};

// A row of pairs: half a word for each number. Subnormal numbers may become zero, which is what the
// instructions for bfloat16 take them for.
HEADRACE_INLINE void put_pairs(uint32_t* row, int first, Floats x) {
#if defined(HEADRACE_AVX512_BF16)
  store((uint16_t*)row + first, (Halves)_mm512_cvtneps_pbh((__m512)x));
#else
  store((uint16_t*)row + first, __builtin_convertvector(round_to_bfloat16(x), Halves));
#endif
}

// Two pieces of a row that follow each other.
HEADRACE_INLINE void put_pairs(uint32_t* row, int first, Floats x, Floats then) {
#if defined(HEADRACE_AVX512_BF16)
  _mm512_storeu_si512((uint16_t*)row + first,
                      (__m512i)_mm512_cvtne2ps_pbh((__m512)then, (__m512)x));
#else
  put_pairs(row, first, x);
  put_pairs(row, first + LANES, then);
#endif
}

#if defined(HEADRACE_AVX512_BF16)
struct Avx512PairProduct {
  static constexpr int PER_WORD = 2, LEFT_WORDS = 1;
  static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x) { put_pairs(row, first, x); }
  static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x, Floats then) {
    put_pairs(row, first, x, then);
  }
  static constexpr int64_t row_words(int64_t numbers) { return numbers / 2; }

  struct Right {
    Words pairs;
    explicit HEADRACE_INLINE Right(const uint32_t* from) : pairs(load<Words>(from)) {}
  };
  static HEADRACE_INLINE Floats add(Floats sum, const uint32_t* left, const Right& right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)all_bits(left[0]),
                                    (__m512bh)right.pairs);
  }
};
#endif

// Where the operands of a product are and how many there are of everything.
struct Shape {
  int rows, blocks, steps, columns;               // `steps` in each block
  int64_t left_stride, right_stride, out_stride;  // in words
  bool from_zero;                                 // the sums begin at zero, not at what `out` holds
};

template <class Product, int R, int C>
HEADRACE_INLINE void multiply_few(const Shape& shape, const uint32_t* left,
                                  const uint32_t* const* right, int first_column, float* out,
                                  Ahead& ahead) {
  Floats sums[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL for (int c = 0; c < C; ++c)
      sums[r][c] = shape.from_zero
                       ? all(0.0f)
                       : load<Floats>(out + r * shape.out_stride + (first_column + c) * LANES);
  for (int block = 0; block < shape.blocks; ++block) {
    const uint32_t* const* columns = right + block * shape.columns + first_column;
    const uint32_t* row = left + (int64_t)block * shape.steps * Product::LEFT_WORDS;
    for (int step = 0; step < shape.steps; ++step) {
      ahead.ask(C);
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        const typename Product::Right b(columns[c] + step * shape.right_stride);
        HEADRACE_UNROLL for (int r = 0; r < R; ++r)
          sums[r][c] = Product::add(sums[r][c],
                                    row + r * shape.left_stride + step * Product::LEFT_WORDS, b);
      }
    }
  }
  HEADRACE_UNROLL for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL for (int c = 0; c < C; ++c)
      store(out + r * shape.out_stride + (first_column + c) * LANES, sums[r][c]);
}

template <class Product, int R>
void multiply_rows(const Shape& shape, const uint32_t* left, const uint32_t* const* right,
                   float* out, Ahead& ahead) {
  int column = 0;
  if constexpr (COLUMNS_AT_ONCE == 4)
    for (; column + 4 <= shape.columns; column += 4)
      multiply_few<Product, R, 4>(shape, left, right, column, out, ahead);
  for (; column + 2 <= shape.columns; column += 2)
    multiply_few<Product, R, 2>(shape, left, right, column, out, ahead);
  for (; column < shape.columns; ++column)
    multiply_few<Product, R, 1>(shape, left, right, column, out, ahead);
}

template <class Product>
struct Multiplier {
  using Left = Product;
  void prepare(int, int) {}

  void multiply(const Shape& shape, const uint32_t* left, const uint32_t* const* right, float* out,
                Ahead& ahead) {
    for (int row = 0; row < shape.rows; row += ROWS_AT_ONCE) {
      const uint32_t* rows = left + row * shape.left_stride;
      float* sums = out + row * shape.out_stride;
      switch (std::min(shape.rows - row, ROWS_AT_ONCE)) {
        case 6:
          multiply_rows<Product, std::min(6, ROWS_AT_ONCE)>(shape, rows, right, sums, ahead);
          break;
        case 5:
          multiply_rows<Product, std::min(5, ROWS_AT_ONCE)>(shape, rows, right, sums, ahead);
          break;
        case 4:
          multiply_rows<Product, 4>(shape, rows, right, sums, ahead);
          break;
        case 3:
          multiply_rows<Product, 3>(shape, rows, right, sums, ahead);
          break;
        case 2:
          multiply_rows<Product, 2>(shape, rows, right, sums, ahead);
          break;
        default:
          multiply_rows<Product, 1>(shape, rows, right, sums, ahead);
      }
    }
  }
};

#if defined(HEADRACE_AMX)

// Tiles 0 to 3 are sums; 4 and 5 the operands of products with K, 6 and 7 of those with V. The
// buffers of left operands and sums have whole tiles of 16 rows.
class TileMultiplier {
 public:
  struct Left {
    static constexpr int PER_WORD = 2, LEFT_WORDS = 1;
    static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x) {
      put_pairs(row, first, x);
    }
    static HEADRACE_INLINE void put(uint32_t* row, int first, Floats x, Floats then) {
      put_pairs(row, first, x, then);
    }
    static constexpr int64_t row_words(int64_t numbers) { return numbers / 2; }
  };

  void prepare(int rows, int block_size) {
    rows = std::min(rows, 16);
    const int pairs = std::min(block_size, 32) / 2;
    if (rows == rows_ && pairs == pairs_) return;
    rows_ = rows;
    pairs_ = pairs;
    TileShapes shapes;
    for (int sums = 0; sums < 4; ++sums) shapes.set(sums, rows, 64);
    shapes.set(4, rows, 64);
    shapes.set(5, 16, 64);
    shapes.set(6, rows, pairs * 4);
    shapes.set(7, pairs, 64);
    tiles_.configure(shapes);
  }

  void multiply(const Shape& shape, const uint32_t* left, const uint32_t* const* right, float* out,
                Ahead& ahead) {
    // Products with K have one block and steps in sixteens; those with V the steps of a block.
    const bool keys = shape.blocks == 1 && shape.from_zero;
    memory_is_read(left);
    for (int row = 0; row < shape.rows; row += 16) {
      const uint32_t* rows = left + row * shape.left_stride;
      float* sums = out + row * shape.out_stride;
      int column = 0;
      for (; column + 4 <= shape.columns; column += 4)
        keys ? few<4, true>(shape, rows, right, column, sums, ahead)
             : few<4, false>(shape, rows, right, column, sums, ahead);
      for (; column + 2 <= shape.columns; column += 2)
        keys ? few<2, true>(shape, rows, right, column, sums, ahead)
             : few<2, false>(shape, rows, right, column, sums, ahead);
      for (; column < shape.columns; ++column)
        keys ? few<1, true>(shape, rows, right, column, sums, ahead)
             : few<1, false>(shape, rows, right, column, sums, ahead);
    }
    memory_is_read(out);
  }

 private:
  template <int C, bool KEYS>
  void few(const Shape& shape, const uint32_t* left, const uint32_t* const* right, int column,
           float* out, Ahead& ahead) {
    const int64_t left_bytes = shape.left_stride * 4, right_bytes = shape.right_stride * 4;
    const int64_t out_bytes = shape.out_stride * 4;
    const int steps_at_once = KEYS ? 16 : pairs_;
    float* sums = out + column * LANES;
    if constexpr (KEYS) {
      _tile_zero(0);
      if constexpr (C > 1) _tile_zero(1);
      if constexpr (C > 2) _tile_zero(2);
      if constexpr (C > 2) _tile_zero(3);
    } else {
      _tile_loadd(0, sums, out_bytes);
      if constexpr (C > 1) _tile_loadd(1, sums + LANES, out_bytes);
      if constexpr (C > 2) _tile_loadd(2, sums + 2 * LANES, out_bytes);
      if constexpr (C > 2) _tile_loadd(3, sums + 3 * LANES, out_bytes);
    }
    for (int block = 0; block < shape.blocks; ++block) {
      const uint32_t* row = left + (int64_t)block * shape.steps;
      const uint32_t* const* right_of = right + block * shape.columns + column;
      for (int step = 0; step < shape.steps; step += steps_at_once) {
        const int64_t offset = step * shape.right_stride;
        if constexpr (KEYS) _tile_loadd(4, row + step, left_bytes);
        else _tile_loadd(6, row + step, left_bytes);
#define HEADRACE_COLUMN(c)                             \
  if constexpr (KEYS) {                                \
    _tile_loadd(5, right_of[c] + offset, right_bytes); \
    _tile_dpbf16ps(c, 4, 5);                           \
    ahead.ask(16);                                     \
  } else {                                             \
    _tile_loadd(7, right_of[c] + offset, right_bytes); \
    _tile_dpbf16ps(c, 6, 7);                           \
    ahead.ask(pairs_);                                 \
  }
        HEADRACE_COLUMN(0)
        if constexpr (C > 1) {
          HEADRACE_COLUMN(1)
        }
        if constexpr (C > 2) {
          HEADRACE_COLUMN(2)
        }
        if constexpr (C > 2) {
          HEADRACE_COLUMN(3)
        }
#undef HEADRACE_COLUMN
      }
    }
    _tile_stored(0, sums, out_bytes);
    if constexpr (C > 1) _tile_stored(1, sums + LANES, out_bytes);
    if constexpr (C > 2) _tile_stored(2, sums + 2 * LANES, out_bytes);
    if constexpr (C > 2) _tile_stored(3, sums + 3 * LANES, out_bytes);
  }

  BorrowedTiles tiles_;
  int rows_ = 0, pairs_ = 0;
};

#endif

}  // namespace headrace
