#include "bf16_product.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "panels.h"
#include "products.h"
#include "tiles.h"

namespace headrace {
namespace {

using Rows = Bf16Product::Rows;
using Weights = Bf16Product::Weights;

#if defined(HEADRACE_AMX)

constexpr int DEPTH = Bf16Product::DEPTH, TILE = COLUMN * DEPTH;

class Tiles : public Multiplying {
 public:
  Tiles(const Rows& x, const Weights& w, int64_t tokens)
      : x_(x), w_(w), rows_(std::min<int64_t>(tokens, ROWS)) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows_ : ROWS, 64);
    tiles_.configure(shapes);
  }

  void operator()(int64_t token, int64_t rows, const int64_t* columns, float* sums) override {
    const uint16_t* weights[PANEL] = {w_.column(columns[0]), w_.column(columns[1])};
    if (rows == 2 * ROWS) return two(token, weights, sums);
    int64_t row = 0;
    for (; row + rows_ <= rows; row += rows_) one(token + row, weights, sums + row * WIDTH);
    if (row == rows) return;
    // Tokens that fill no tile: with some before them once more, in a full one. They are the same
    // bits.
    const int64_t again = rows_ - (rows - row);
    one(token + row - again, weights, spare_);
    std::copy_n(spare_ + again * WIDTH, (rows - row) * WIDTH, sums + row * WIDTH);
  }

 private:
  // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
  void two(int64_t token, const uint16_t* const* weights, float* sums) {
    const int64_t inputs = w_.inputs, width = inputs * 2;
    const uint16_t *x = x_.numbers + token * inputs, *below = x + ROWS * inputs;
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
    _tile_stored(0, sums, WIDTH * 4);
    _tile_stored(1, sums + COLUMN, WIDTH * 4);
    _tile_stored(2, sums + ROWS * WIDTH, WIDTH * 4);
    _tile_stored(3, sums + ROWS * WIDTH + COLUMN, WIDTH * 4);
    memory_is_read(sums);
  }

  void one(int64_t token, const uint16_t* const* weights, float* sums) {
    const int64_t inputs = w_.inputs, width = inputs * 2;
    const uint16_t* x = x_.numbers + token * inputs;
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
    _tile_stored(0, sums, WIDTH * 4);
    _tile_stored(1, sums + COLUMN, WIDTH * 4);
    memory_is_read(sums);
  }

  const Rows x_;
  const Weights w_;
  const int64_t rows_;
  BorrowedTiles tiles_;
  alignas(64) float spare_[ROWS * WIDTH];
};

#endif

#if defined(HEADRACE_AVX512_BF16)

class Vectors : public Multiplying {
 public:
  Vectors(const Rows& x, const Weights& w) : x_(x), w_(w) {}

  void operator()(int64_t token, int64_t rows, const int64_t* columns, float* sums) override {
    const uint16_t *left = w_.column(columns[0]), *right = w_.column(columns[1]);
    for (; rows >= MOST; rows -= MOST, token += MOST, sums += MOST * WIDTH)
      few<MOST>(token, left, right, sums);
    switch (rows) {
      case 7:
        return few<7>(token, left, right, sums);
      case 6:
        return few<6>(token, left, right, sums);
      case 5:
        return few<5>(token, left, right, sums);
      case 4:
        return few<4>(token, left, right, sums);
      case 3:
        return few<3>(token, left, right, sums);
      case 2:
        return few<2>(token, left, right, sums);
      case 1:
        return few<1>(token, left, right, sums);
    }
  }

 private:
  static constexpr int MOST = 8;  // tokens times PANEL sums, and the weights, in 32 registers

  template <int R>
  void few(int64_t first, const uint16_t* left, const uint16_t* right, float* to) {
    const int64_t inputs = w_.inputs;
    const uint16_t* x = x_.numbers + first * inputs;
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
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(to + r * WIDTH, sums[r][0]);
      _mm512_storeu_ps(to + r * WIDTH + COLUMN, sums[r][1]);
    }
  }

  const Rows x_;
  const Weights w_;
};

#endif

}  // namespace

bool Bf16Product::can_run() {
#if defined(HEADRACE_AVX512_BF16)
  return true;
#elif defined(HEADRACE_AMX)
  return may_use_tiles();
#else
  return false;
#endif
}

std::unique_ptr<Multiplying> Bf16Product::new_multiplying(const Rows& x, const Weights& w,
                                                          int64_t tokens) {
#if defined(HEADRACE_AMX)
  if (may_use_tiles()) return std::make_unique<Tiles>(x, w, tokens);
#endif
#if defined(HEADRACE_AVX512_BF16)
  return std::make_unique<Vectors>(x, w);
#else
  return nullptr;
#endif
}

}  // namespace headrace
