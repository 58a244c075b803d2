// Products of activations with weights that lie packed since they were loaded:
//
//     out[tokens][outputs] = x[tokens][inputs] . w[layer][outputs][inputs]^T
//
// in bfloat16 with sums in float32. Packed, a layer of w is [outputs / 16][inputs / 32][16][16][2]:
// pairs of inputs together, sixteen outputs side by side, which is the right operand of the
// instructions for bfloat16. The inputs are summed in order, so a token has the same bits whatever
// it is computed with.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "left_rows.h"
#include "panels.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {
namespace {

namespace ffi = xla::ffi;

constexpr int DEPTH = 32;             // inputs of a tile
constexpr int TILE = COLUMN * DEPTH;  // numbers

struct Product {
  const uint16_t *x, *w;
  float* out;
  int64_t tokens, inputs, outputs;

  const uint16_t* column(int64_t index) const { return w + index * (inputs / DEPTH) * TILE; }
};

#if defined(HEADRACE_AMX)

class TileProjector {
 public:
  explicit TileProjector(const Product& product) : product_(product) {
    rows_ = std::min<int64_t>(product.tokens, ROWS);
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows_ : ROWS, 64);
    tiles_.configure(shapes);
  }

  void operator()(int64_t first, int64_t end, int64_t column) {
    const Product& p = product_;
    const uint16_t* weights[PANEL] = {p.column(column), p.column(column + 1)};
    float* out = p.out + column * COLUMN;
    const int64_t width = p.inputs * 2, out_width = p.outputs * 4;
    int64_t token = first;
    for (; token + 2 * ROWS <= end; token += 2 * ROWS)
      two(p.x + token * p.inputs, width, weights, out + token * p.outputs, out_width);
    for (; token + rows_ <= end; token += rows_)
      one(p.x + token * p.inputs, width, weights, out + token * p.outputs, out_width);
    if (token == end) return;
    // Tokens that fill no tile: the last ones once more, in a full one. They are the same bits.
    const int64_t last = end - rows_;
    one(p.x + last * p.inputs, width, weights, out + last * p.outputs, out_width);
  }

 private:
  // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
  void two(const uint16_t* x, int64_t width, const uint16_t* const* weights, float* out, int64_t out_width) {
    const int64_t steps = product_.inputs / DEPTH;
    const uint16_t* below = x + ROWS * product_.inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
      _tile_loadd(4, x + step * DEPTH, width);
      _tile_loadd(6, weights[0] + step * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights[1] + step * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, below + step * DEPTH, width);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* out_below = out + ROWS * product_.outputs;
    _tile_stored(0, out, out_width);
    _tile_stored(1, out + COLUMN, out_width);
    _tile_stored(2, out_below, out_width);
    _tile_stored(3, out_below + COLUMN, out_width);
    memory_is_read(out);
  }

  void one(const uint16_t* x, int64_t width, const uint16_t* const* weights, float* out, int64_t out_width) {
    const int64_t steps = product_.inputs / DEPTH;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < steps; ++step) {
      _tile_loadd(4, x + step * DEPTH, width);
      _tile_loadd(6, weights[0] + step * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights[1] + step * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, out_width);
    _tile_stored(1, out + COLUMN, out_width);
    memory_is_read(out);
  }

  const Product& product_;
  int64_t rows_;
  BorrowedTiles tiles_;
};

#endif

#if defined(HEADRACE_AVX512_BF16)

class VectorProjector {
 public:
  explicit VectorProjector(const Product& product) : product_(product) {}

  void operator()(int64_t first, int64_t end, int64_t column) {
    for (; first + MOST <= end; first += MOST) few<MOST>(first, column);
    switch (end - first) {
      case 7: few<7>(first, column); break;
      case 6: few<6>(first, column); break;
      case 5: few<5>(first, column); break;
      case 4: few<4>(first, column); break;
      case 3: few<3>(first, column); break;
      case 2: few<2>(first, column); break;
      case 1: few<1>(first, column); break;
    }
  }

 private:
  static constexpr int MOST = 8;  // tokens times PANEL sums, and the weights, in 32 registers

  template <int R>
  void few(int64_t first, int64_t column) {
    const Product& p = product_;
    const uint16_t *left = p.column(column), *right = p.column(column + 1);
    const uint16_t* x = p.x + first * p.inputs;
    __m512 sums[R][PANEL];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < p.inputs / 2; ++pair) {
      const __m512bh a = (__m512bh)_mm512_loadu_si512(left + pair * 2 * COLUMN);
      const __m512bh b = (__m512bh)_mm512_loadu_si512(right + pair * 2 * COLUMN);
      for (int r = 0; r < R; ++r) {
        int32_t both;
        std::memcpy(&both, x + r * p.inputs + pair * 2, 4);
        const __m512bh token = (__m512bh)_mm512_set1_epi32(both);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], token, a);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], token, b);
      }
    }
    float* out = p.out + first * p.outputs + column * COLUMN;
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(out + r * p.outputs, sums[r][0]);
      _mm512_storeu_ps(out + r * p.outputs + COLUMN, sums[r][1]);
    }
  }

  const Product& product_;
};

#endif

// Rounds the rows to bfloat16, as the left operands of all panels.
void round_rows(ffi::ThreadPool& pool, const LeftRows& rows, uint16_t* to) {
  prepare_rows(pool, rows, [&](int64_t token, const float* row, float*) {
    for (int64_t i = 0; i < rows.inputs; i += LANES)
      put_pairs((uint32_t*)(to + token * rows.inputs), i, load<Floats>(row + i));
  });
}

ffi::Error project(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm,
                   ffi::Buffer<ffi::BF16> w, ffi::Buffer<ffi::S32> layer,
                   ffi::ResultBuffer<ffi::F32> out, float eps) {
  const int64_t inputs = w.dimensions()[2] * DEPTH, outputs = out->dimensions()[1];
  const LeftRows rows = left_rows(x, norm, eps, inputs);
  if (rows.tokens == 0) return ffi::Error::Success();
  const int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= w.dimensions()[0])
    return ffi::Error::InvalidArgument("there are no weights for this layer");
  const auto rounded = (uint16_t*)thread_memory(rows.tokens * inputs * sizeof(uint16_t));
  if (rounded == nullptr)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for products");
  round_rows(pool, rows, rounded);
  const auto weights = (const uint16_t*)w.untyped_data() + index * outputs * inputs;
  const Product product{rounded, weights, out->typed_data(), rows.tokens, inputs, outputs};
#if defined(HEADRACE_AMX)
  if (may_use_tiles()) {
    share_panels<TileProjector>(pool, product);
    return ffi::Error::Success();
  }
#endif
#if defined(HEADRACE_AVX512_BF16)
  share_panels<VectorProjector>(pool, product);
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "this CPU has no instructions for bfloat16");
#endif
}

}  // namespace
}  // namespace headrace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_project, headrace::project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps"));

#pragma GCC visibility pop
