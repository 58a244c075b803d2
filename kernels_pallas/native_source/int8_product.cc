#include "int8_product.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "int8_rows.h"
#include "panels.h"
#include "tiles.h"
#include "vectors.h"

#if defined(HEADRACE_AMX) && defined(__AMX_INT8__)
#define HEADRACE_AMX_INT8 1
#endif

namespace headrace {
namespace {

using Rows = Int8Product::Rows;
using Weights = Int8Product::Weights;

constexpr int DEPTH = Int8Product::DEPTH, WORD = Int8Product::WORD;

// Both scales, for LANES sums of a token, from output `first` of a column on.
HEADRACE_INLINE Floats scaled(const Rows& x, const Weights& w, int64_t token, int64_t column,
                              int first, Ints sums) {
  const Floats of_token = __builtin_convertvector(sums, Floats) * x.rows.scales[token];
  return of_token * load<Floats>(w.scales + column * COLUMN + first);
}

#if defined(HEADRACE_AMX_INT8)

class Tiles : public Multiplying {
 public:
  Tiles(const Rows& x, const Weights& w, int64_t tokens)
      : x_(x), w_(w), rows_(std::min<int64_t>(tokens, ROWS)) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows_ : ROWS, 64);
    tiles_.configure(shapes);
  }

  void operator()(int64_t token, int64_t rows, const int64_t* columns, float* sums) override {
    if (rows == 2 * ROWS) {
      two(token, columns);
      return finish(token, 0, rows, columns, sums);
    }
    int64_t row = 0;
    for (; row + rows_ <= rows; row += rows_) {
      one(token + row, columns);
      finish(token + row, 0, rows_, columns, sums + row * WIDTH);
    }
    if (row == rows) return;
    // Tokens that fill no tile: with some before them once more, in a full one. They are the same
    // bits.
    const int64_t again = rows_ - (rows - row);
    one(token + row - again, columns);
    finish(token + row - again, again, rows - row, columns, sums + row * WIDTH);
  }

 private:
  // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
  void two(int64_t token, const int64_t* columns) {
    const int64_t inputs = w_.inputs;
    const int8_t *x = x_.rows.numbers + token * inputs, *below = x + ROWS * inputs;
    const int8_t *left = w_.column(columns[0]), *right = w_.column(columns[1]);
    memory_is_read(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < inputs; step += DEPTH) {
      _tile_loadd(4, x + step, inputs);
      _tile_loadd(6, left + step * COLUMN, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, right + step * COLUMN, 64);
      _tile_dpbssd(1, 4, 7);
      _tile_loadd(5, below + step, inputs);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums_[0], sizeof sums_[0]);
    _tile_stored(1, sums_[0] + COLUMN, sizeof sums_[0]);
    _tile_stored(2, sums_[ROWS], sizeof sums_[0]);
    _tile_stored(3, sums_[ROWS] + COLUMN, sizeof sums_[0]);
  }

  void one(int64_t token, const int64_t* columns) {
    const int64_t inputs = w_.inputs;
    const int8_t* x = x_.rows.numbers + token * inputs;
    const int8_t *left = w_.column(columns[0]), *right = w_.column(columns[1]);
    memory_is_read(x);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < inputs; step += DEPTH) {
      _tile_loadd(4, x + step, inputs);
      _tile_loadd(6, left + step * COLUMN, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, right + step * COLUMN, 64);
      _tile_dpbssd(1, 4, 7);
    }
    _tile_stored(0, sums_[0], sizeof sums_[0]);
    _tile_stored(1, sums_[0] + COLUMN, sizeof sums_[0]);
  }

  // Of sums that begin with token `token`, those of `rows` rows from `first` on.
  void finish(int64_t token, int64_t first, int64_t rows, const int64_t* columns, float* to) {
    memory_is_read(sums_);
    for (int64_t row = first; row < first + rows; ++row, to += WIDTH)
      for (int i = 0; i < WIDTH; i += LANES) {
        const Ints sums = load<Ints>(sums_[row] + i);
        store(to + i, scaled(x_, w_, token + row, columns[i / COLUMN], i % COLUMN, sums));
      }
  }

  const Rows x_;
  const Weights w_;
  const int64_t rows_;
  BorrowedTiles tiles_;
  alignas(64) int32_t sums_[2 * ROWS][WIDTH];
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

class Vectors : public Multiplying {
 public:
  Vectors(const Rows& x, const Weights& w) : x_(x), w_(w) {}

  void operator()(int64_t token, int64_t rows, const int64_t* columns, float* sums) override {
    for (; rows >= MOST; rows -= MOST, token += MOST, sums += MOST * WIDTH)
      few<MOST>(token, columns, sums);
    if constexpr (MOST > 4)
      if (rows >= 4) few<4>(token, columns, sums), rows -= 4, token += 4, sums += 4 * WIDTH;
    if (rows >= 2) few<2>(token, columns, sums), rows -= 2, token += 2, sums += 2 * WIDTH;
    if (rows > 0) few<1>(token, columns, sums);
  }

 private:
  static constexpr int PARTS = COLUMN / LANES, VECTORS = PANEL * PARTS;
  static constexpr int MOST = LANES == 16 ? 8 : 2;  // tokens whose sums fit into the registers

  template <int R>
  void few(int64_t first, const int64_t* columns, float* to) {
    const int8_t* weights[PANEL] = {w_.column(columns[0]), w_.column(columns[1])};
    const int64_t inputs = w_.inputs;
    const int8_t* x = x_.rows.numbers + first * inputs;
    Ints sums[R][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = Dot::begin(x_.rows.sums[first + r]);
    for (int64_t input = 0; input < inputs; input += WORD) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        const int8_t* from = weights[v / PARTS] + input * COLUMN + v % PARTS * LANES * WORD;
        const typename Dot::Left left(load<Words>(from));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const typename Dot::Right right(load<uint32_t>(x + r * inputs + input));
          sums[r][v] = Dot::add(sums[r][v], left, right);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        store(to + r * WIDTH + v * LANES,
              scaled(x_, w_, first + r, columns[v / PARTS], v % PARTS * LANES, sums[r][v]));
  }

  const Rows x_;
  const Weights w_;
};

}  // namespace

std::unique_ptr<Multiplying> Int8Product::new_multiplying(const Rows& x, const Weights& w,
                                                          int64_t tokens) {
#if defined(HEADRACE_AMX_INT8)
  if (may_use_tiles()) return std::make_unique<Tiles>(x, w, tokens);
#endif
  return std::make_unique<Vectors>(x, w);
}

}  // namespace headrace
