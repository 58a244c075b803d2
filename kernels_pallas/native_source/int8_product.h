// Products of activations with weights of eight bits that lie packed since they were loaded:
//
//     sums[tokens][outputs] = rounded rows[tokens][inputs] . w[outputs][inputs]^T, and scales
//
// Packed, w is [outputs / 16][inputs / 64][16][16][4]: four inputs together, sixteen outputs side
// by side, which is the right operand of the instructions for eight bits. Sums are integers and
// exact in every order; scales are multiplied in one, that of the token before that of the output.
// So every path has the same bits, XLA's included.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "int8_rows.h"
#include "panels.h"
#include "tiles.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

#if defined(HEADRACE_AMX) && defined(__AMX_INT8__)
#define HEADRACE_AMX_INT8 1
#endif

namespace headrace {

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
    Ints numbers[4];
    explicit HEADRACE_INLINE Each(Words words) {
      for (int i = 0; i < 4; ++i) numbers[i] = (Ints)(words << (24 - 8 * i)) >> 24;
    }
  };
  using Left = Each;
  struct Right : Each {
    explicit HEADRACE_INLINE Right(uint32_t word) : Each(all_bits(word)) {}
  };
  static HEADRACE_INLINE Ints begin(int32_t) { return Ints{}; }
  static HEADRACE_INLINE Ints add(Ints sums, const Left& left, const Right& right) {
    for (int i = 0; i < 4; ++i) sums += left.numbers[i] * right.numbers[i];
    return sums;
  }
};

#endif

struct Int8Product {
  using Number = int8_t;

  static constexpr int DEPTH = 64;  // inputs of a tile
  static constexpr int WORD = 4;    // numbers in a word of a row, or of weights

  static_assert(DEPTH == ROTATED, "a row has whole tiles exactly if it can be rotated");

  // Rows that have been rotated and rounded, each as a whole.
  struct Rows {
    static constexpr bool TAKES_PIECES = false;
    RoundedRows rows;
    int64_t inputs;

    static size_t bytes(int64_t tokens, int64_t inputs) {
      return numbers_bytes(tokens, inputs) + tokens * (sizeof(float) + sizeof(int32_t));
    }
    static Rows at(char* memory, int64_t tokens, int64_t inputs) {
      float* scales = (float*)(memory + numbers_bytes(tokens, inputs));
      return {{(int8_t*)memory, scales, (int32_t*)(scales + tokens)}, inputs};
    }
    static size_t numbers_bytes(int64_t tokens, int64_t inputs) {
      return (tokens * inputs + 63) / 64 * 64;
    }

    void round(int64_t token, const float* row, float* room) const {
      round_row(row, inputs, room, rows.numbers + token * inputs, rows.scales[token],
                rows.sums[token]);
    }
  };

  struct Weights {
    const int8_t* w;
    const float* scales;
    int64_t outputs, inputs;

    const int8_t* column(int64_t index) const { return w + index * inputs * COLUMN; }
  };

  template <class Sink>
  struct Task {
    Rows x;
    Weights w;
    int64_t tokens;
    Sink sink;

    // Both scales, for LANES sums of a token, from output `first` of a column on.
    HEADRACE_INLINE Floats scaled(int64_t token, int64_t column, int first, Ints sums) const {
      const Floats of_token = __builtin_convertvector(sums, Floats) * x.rows.scales[token];
      return of_token * load<Floats>(w.scales + column * COLUMN + first);
    }
  };

  static bool can_run() { return true; }

  template <class Sink>
  static void add(Phases& phases, const Rows& x, const Weights& w, int64_t tokens, const Sink& sink);

  template <class Sink>
  class TileProjector;
  template <class Sink>
  class VectorProjector;
};

#if defined(HEADRACE_AMX_INT8)

template <class Sink>
class Int8Product::TileProjector {
 public:
  explicit TileProjector(const Task<Sink>& task)
      : task_(task), rows_(std::min<int64_t>(task.tokens, ROWS)) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows_ : ROWS, 64);
    tiles_.configure(shapes);
  }

  void operator()(int64_t first, int64_t end, int64_t panel) {
    for (; first + 2 * ROWS <= end; first += 2 * ROWS) {
      two(first, panel);
      finish(first, first, 2 * ROWS, panel);
    }
    for (; first + rows_ <= end; first += rows_) {
      one(first, panel);
      finish(first, first, rows_, panel);
    }
    if (first == end) return;
    // Tokens that fill no tile: with some before them once more, in a full one. They are the same bits.
    one(end - rows_, panel);
    finish(end - rows_, first, end - first, panel);
  }

 private:
  // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
  void two(int64_t token, int64_t panel) {
    const int64_t inputs = task_.w.inputs;
    const int8_t *x = task_.x.rows.numbers + token * inputs, *below = x + ROWS * inputs;
    const int8_t* left = task_.w.column(task_.sink.column(panel, 0));
    const int8_t* right = task_.w.column(task_.sink.column(panel, 1));
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

  void one(int64_t token, int64_t panel) {
    const int64_t inputs = task_.w.inputs;
    const int8_t* x = task_.x.rows.numbers + token * inputs;
    const int8_t* left = task_.w.column(task_.sink.column(panel, 0));
    const int8_t* right = task_.w.column(task_.sink.column(panel, 1));
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

  // Of sums that begin with token `begin`, those of `rows` tokens from `token` on.
  void finish(int64_t begin, int64_t token, int64_t rows, int64_t panel) {
    memory_is_read(sums_);
    for (int64_t row = 0; row < rows; ++row)
      for (int i = 0; i < WIDTH; i += LANES) {
        const int64_t column = task_.sink.column(panel, i / COLUMN);
        const Ints sums = load<Ints>(sums_[token - begin + row] + i);
        store(scaled_[row] + i, task_.scaled(token + row, column, i % COLUMN, sums));
      }
    task_.sink(token, rows, panel, scaled_[0]);
  }

  const Task<Sink> task_;
  int64_t rows_;
  BorrowedTiles tiles_;
  alignas(64) int32_t sums_[2 * ROWS][WIDTH];
  alignas(64) float scaled_[2 * ROWS][WIDTH];
};

#endif

template <class Sink>
class Int8Product::VectorProjector {
 public:
  explicit VectorProjector(const Task<Sink>& task) : task_(task) {}

  void operator()(int64_t first, int64_t end, int64_t panel) {
    for (; first + MOST <= end; first += MOST) few<MOST>(first, panel);
    if constexpr (MOST > 4)
      if (first + 4 <= end) few<4>(first, panel), first += 4;
    if (first + 2 <= end) few<2>(first, panel), first += 2;
    if (first < end) few<1>(first, panel);
  }

 private:
  static constexpr int PARTS = COLUMN / LANES, VECTORS = PANEL * PARTS;
  static constexpr int MOST = LANES == 16 ? 8 : 2;  // tokens whose sums fit into the registers

  template <int R>
  void few(int64_t first, int64_t panel) {
    const int64_t columns[PANEL] = {task_.sink.column(panel, 0), task_.sink.column(panel, 1)};
    const int8_t* weights[PANEL] = {task_.w.column(columns[0]), task_.w.column(columns[1])};
    const int64_t inputs = task_.w.inputs;
    const int8_t* x = task_.x.rows.numbers + first * inputs;
    Ints sums[R][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = Dot::begin(task_.x.rows.sums[first + r]);
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
    alignas(64) float scaled[R][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        store(scaled[r] + v * LANES,
              task_.scaled(first + r, columns[v / PARTS], v % PARTS * LANES, sums[r][v]));
    task_.sink(first, R, panel, scaled[0]);
  }

  const Task<Sink> task_;
};

template <class Sink>
void Int8Product::add(Phases& phases, const Rows& x, const Weights& w, int64_t tokens, const Sink& sink) {
  const Task<Sink> task{x, w, tokens, sink};
  const int64_t panels = w.outputs / WIDTH;
#if defined(HEADRACE_AMX_INT8)
  if (may_use_tiles()) {
    add_panels(phases, tokens, panels, [=] { return std::make_unique<TileProjector<Sink>>(task); });
    return;
  }
#endif
  add_panels(phases, tokens, panels, [=] { return std::make_unique<VectorProjector<Sink>>(task); });
}

}  // namespace headrace
