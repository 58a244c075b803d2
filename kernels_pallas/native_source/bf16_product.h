// Products of activations with weights that lie packed since they were loaded:
//
//     sums[tokens][outputs] = rows[tokens][inputs] . w[outputs][inputs]^T
//
// in bfloat16 with sums in float32. Packed, w is [outputs / 16][inputs / 32][16][16][2]: pairs of
// inputs together, sixteen outputs side by side, which is the right operand of the instructions
// for bfloat16. The inputs are summed in order, so a token has the same bits whatever it is
// computed with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "panels.h"
#include "products.h"
#include "tiles.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {

struct Bf16Product {
  using Number = uint16_t;

  static constexpr int DEPTH = 32;             // inputs of a tile
  static constexpr int TILE = COLUMN * DEPTH;  // numbers

  // Rows that have been rounded. Each piece of one can be put for itself.
  struct Rows {
    static constexpr bool TAKES_PIECES = true;
    uint16_t* numbers;
    int64_t inputs;

    static size_t bytes(int64_t tokens, int64_t inputs) { return tokens * inputs * 2; }
    static Rows at(char* memory, int64_t, int64_t inputs) { return {(uint16_t*)memory, inputs}; }

    // LANES numbers of a row, from `input` on.
    void put(int64_t token, int64_t input, Floats x) const {
      put_pairs((uint32_t*)(numbers + token * inputs), input, x);
    }
    void round(int64_t token, const float* row, float*) const {
      for (int64_t i = 0; i < inputs; i += LANES) put(token, i, load<Floats>(row + i));
    }
  };

  struct Weights {
    const uint16_t* w;
    const float* scales;  // none
    int64_t outputs, inputs;

    const uint16_t* column(int64_t index) const { return w + index * (inputs / DEPTH) * TILE; }
  };

  template <class Sink>
  struct Task {
    Rows x;
    Weights w;
    int64_t tokens;
    Sink sink;
  };

  // Whether the processor has the instructions.
  static bool can_run();

  template <class Sink>
  static void add(Phases& phases, const Rows& x, const Weights& w, int64_t tokens, const Sink& sink);

  template <class Sink>
  class TileProjector;
  template <class Sink>
  class VectorProjector;
};

#if defined(HEADRACE_AMX)

template <class Sink>
class Bf16Product::TileProjector {
 public:
  explicit TileProjector(const Task<Sink>& task) : task_(task) {
    rows_ = std::min<int64_t>(task.tokens, ROWS);
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows_ : ROWS, 64);
    tiles_.configure(shapes);
  }

  void operator()(int64_t first, int64_t end, int64_t panel) {
    const uint16_t* weights[PANEL] = {task_.w.column(task_.sink.column(panel, 0)),
                                      task_.w.column(task_.sink.column(panel, 1))};
    for (; first + 2 * ROWS <= end; first += 2 * ROWS) {
      two(first, weights);
      task_.sink(first, 2 * ROWS, panel, sums_[0]);
    }
    for (; first + rows_ <= end; first += rows_) {
      one(first, weights);
      task_.sink(first, rows_, panel, sums_[0]);
    }
    if (first == end) return;
    // Tokens that fill no tile: with some before them once more, in a full one. They are the same bits.
    const int64_t begin = end - rows_;
    one(begin, weights);
    task_.sink(first, end - first, panel, sums_[first - begin]);
  }

 private:
  // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
  void two(int64_t token, const uint16_t* const* weights) {
    const int64_t inputs = task_.w.inputs, width = inputs * 2;
    const uint16_t *x = task_.x.numbers + token * inputs, *below = x + ROWS * inputs;
    memory_is_read(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < inputs / DEPTH; ++step) {
      _tile_loadd(4, x + step * DEPTH, width);
      _tile_loadd(6, weights[0] + step * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights[1] + step * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, below + step * DEPTH, width);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums_[0], sizeof sums_[0]);
    _tile_stored(1, sums_[0] + COLUMN, sizeof sums_[0]);
    _tile_stored(2, sums_[ROWS], sizeof sums_[0]);
    _tile_stored(3, sums_[ROWS] + COLUMN, sizeof sums_[0]);
    memory_is_read(sums_);
  }

  void one(int64_t token, const uint16_t* const* weights) {
    const int64_t inputs = task_.w.inputs, width = inputs * 2;
    const uint16_t* x = task_.x.numbers + token * inputs;
    memory_is_read(x);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < inputs / DEPTH; ++step) {
      _tile_loadd(4, x + step * DEPTH, width);
      _tile_loadd(6, weights[0] + step * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights[1] + step * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums_[0], sizeof sums_[0]);
    _tile_stored(1, sums_[0] + COLUMN, sizeof sums_[0]);
    memory_is_read(sums_);
  }

  const Task<Sink> task_;
  int64_t rows_;
  BorrowedTiles tiles_;
  alignas(64) float sums_[2 * ROWS][WIDTH];
};

#endif

#if defined(HEADRACE_AVX512_BF16)

template <class Sink>
class Bf16Product::VectorProjector {
 public:
  explicit VectorProjector(const Task<Sink>& task) : task_(task) {}

  void operator()(int64_t first, int64_t end, int64_t panel) {
    for (; first + MOST <= end; first += MOST) few<MOST>(first, panel);
    switch (end - first) {
      case 7: few<7>(first, panel); break;
      case 6: few<6>(first, panel); break;
      case 5: few<5>(first, panel); break;
      case 4: few<4>(first, panel); break;
      case 3: few<3>(first, panel); break;
      case 2: few<2>(first, panel); break;
      case 1: few<1>(first, panel); break;
    }
  }

 private:
  static constexpr int MOST = 8;  // tokens times PANEL sums, and the weights, in 32 registers

  template <int R>
  void few(int64_t first, int64_t panel) {
    const uint16_t* left = task_.w.column(task_.sink.column(panel, 0));
    const uint16_t* right = task_.w.column(task_.sink.column(panel, 1));
    const int64_t inputs = task_.w.inputs;
    const uint16_t* x = task_.x.numbers + first * inputs;
    __m512 sums[R][PANEL];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < inputs / 2; ++pair) {
      const __m512bh a = (__m512bh)_mm512_loadu_si512(left + pair * 2 * COLUMN);
      const __m512bh b = (__m512bh)_mm512_loadu_si512(right + pair * 2 * COLUMN);
      for (int r = 0; r < R; ++r) {
        int32_t both;
        std::memcpy(&both, x + r * inputs + pair * 2, 4);
        const __m512bh token = (__m512bh)_mm512_set1_epi32(both);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], token, a);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], token, b);
      }
    }
    alignas(64) float stored[R][WIDTH];
    for (int r = 0; r < R; ++r) {
      _mm512_store_ps(stored[r], sums[r][0]);
      _mm512_store_ps(stored[r] + COLUMN, sums[r][1]);
    }
    task_.sink(first, R, panel, stored[0]);
  }

  const Task<Sink> task_;
};

#endif

inline bool Bf16Product::can_run() {
#if defined(HEADRACE_AVX512_BF16)
  return true;
#elif defined(HEADRACE_AMX)
  return may_use_tiles();
#else
  return false;
#endif
}

template <class Sink>
void Bf16Product::add(Phases& phases, const Rows& x, const Weights& w, int64_t tokens, const Sink& sink) {
  [[maybe_unused]] const Task<Sink> task{x, w, tokens, sink};
  [[maybe_unused]] const int64_t panels = w.outputs / WIDTH;
#if defined(HEADRACE_AMX)
  if (may_use_tiles()) {
    add_panels(phases, tokens, panels, [=] { return std::make_unique<TileProjector<Sink>>(task); });
    return;
  }
#endif
#if defined(HEADRACE_AVX512_BF16)
  add_panels(phases, tokens, panels, [=] { return std::make_unique<VectorProjector<Sink>>(task); });
#endif
}

}  // namespace headrace
