#include "bf16_product.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "panels.h"
#include "products.h"
#include "tile_panels.h"
#include "tiles.h"

namespace headrace {
namespace {

using Rows = Bf16Product::Rows;
using Weights = Bf16Product::Weights;

#if defined(HEADRACE_AMX)

struct Tiles {
  using Number = uint16_t;
  using Sum = float;
  static constexpr int DEPTH = Bf16Product::DEPTH;

  static HEADRACE_INLINE void add_above_left() { _tile_dpbf16ps(0, 4, 6); }
  static HEADRACE_INLINE void add_above_right() { _tile_dpbf16ps(1, 4, 7); }
  static HEADRACE_INLINE void add_below_left() { _tile_dpbf16ps(2, 5, 6); }
  static HEADRACE_INLINE void add_below_right() { _tile_dpbf16ps(3, 5, 7); }

  const float* floats(int64_t, int64_t, const int64_t*, float* sums) const { return sums; }

  Rows x;
  Weights w;
};

#endif

#if defined(HEADRACE_AVX512_BF16)

class Vectors : public Multiplying {
 public:
  Vectors(const Rows& x, const Weights& w) : x_(x), w_(w) {}

  void operator()(const Share& share, const Sums& sums) override {
    alignas(64) float numbers[MOST * WIDTH];
    for (int64_t panel = share.first_panel; panel < share.end_panel; ++panel) {
      const uint16_t* left = w_.column(sums.column(panel, 0));
      const uint16_t* right = w_.column(sums.column(panel, 1));
      for (int64_t token = share.first_token; token < share.end_token; token += MOST) {
        const int64_t rows = std::min<int64_t>(share.end_token - token, MOST);
        some(token, rows, left, right, numbers);
        sums.take(token, rows, panel, numbers);
      }
    }
  }

 private:
  void some(int64_t token, int64_t rows, const uint16_t* left, const uint16_t* right, float* sums) {
    switch (rows) {
      case MOST:
        return few<MOST>(token, left, right, sums);
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
  if (may_use_tiles()) return std::make_unique<TilePanels<Tiles>>(Tiles{x, w}, tokens);
#endif
#if defined(HEADRACE_AVX512_BF16)
  return std::make_unique<Vectors>(x, w);
#else
  return nullptr;
#endif
}

}  // namespace headrace
