// Products of activations with weights of eight bits that lie packed since they were loaded:
//
//     out[tokens][outputs] = rounded x[tokens][inputs] . w[layer][outputs][inputs]^T, and scales
//
// Packed, a layer of w is [outputs / 16][inputs / 64][16][16][4]: four inputs together, sixteen
// outputs side by side, which is the right operand of the instructions for eight bits. Sums are
// integers and exact in every order; scales are multiplied in one, that of the token before that
// of the output. So every path has the same bits, XLA's included.

#include <algorithm>
#include <cstdint>
#include <memory>

#include "int8_rows.h"
#include "left_rows.h"
#include "panels.h"
#include "tiles.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

#if defined(HEADRACE_AMX) && defined(__AMX_INT8__)
#define HEADRACE_AMX_INT8 1
#endif

namespace headrace {
namespace {

namespace ffi = xla::ffi;

constexpr int DEPTH = 64;  // inputs of a tile
constexpr int WORD = 4;    // numbers in a word of a row, or of weights

static_assert(DEPTH == ROTATED, "a row has whole tiles exactly if it can be rotated");

struct Int8Product {
  RoundedRows x;
  const int8_t* w;
  const float* w_scales;
  float* out;
  int64_t tokens, inputs, outputs;

  const int8_t* column(int64_t index) const { return w + index * inputs * COLUMN; }
};

// Both scales, for LANES outputs of a token.
HEADRACE_INLINE void finish(const Int8Product& p, int64_t token, int64_t output, Ints sums) {
  const Floats of_token = __builtin_convertvector(sums, Floats) * p.x.scales[token];
  store(p.out + token * p.outputs + output, of_token * load<Floats>(p.w_scales + output));
}

#if defined(HEADRACE_AMX_INT8)

class TileProjector {
 public:
  explicit TileProjector(const Int8Product& product)
      : product_(product), rows_(std::min<int64_t>(product.tokens, ROWS)) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows_ : ROWS, 64);
    tiles_.configure(shapes);
  }

  void operator()(int64_t first, int64_t end, int64_t column) {
    for (; first + 2 * ROWS <= end; first += 2 * ROWS) two(first, column);
    for (; first + rows_ <= end; first += rows_) one(first, column);
    // Tokens that fill no tile: the last ones once more, in a full one. They are the same bits.
    if (first < end) one(end - rows_, column);
  }

 private:
  // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
  void two(int64_t token, int64_t column) {
    const Int8Product& p = product_;
    const int8_t *x = p.x.numbers + token * p.inputs, *below = x + ROWS * p.inputs;
    const int8_t *left = p.column(column), *right = p.column(column + 1);
    memory_is_read(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < p.inputs; step += DEPTH) {
      _tile_loadd(4, x + step, p.inputs);
      _tile_loadd(6, left + step * COLUMN, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, right + step * COLUMN, 64);
      _tile_dpbssd(1, 4, 7);
      _tile_loadd(5, below + step, p.inputs);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums_[0], sizeof sums_[0]);
    _tile_stored(1, sums_[0] + COLUMN, sizeof sums_[0]);
    _tile_stored(2, sums_[ROWS], sizeof sums_[0]);
    _tile_stored(3, sums_[ROWS] + COLUMN, sizeof sums_[0]);
    finish_rows(2 * ROWS, token, column);
  }

  void one(int64_t token, int64_t column) {
    const Int8Product& p = product_;
    const int8_t* x = p.x.numbers + token * p.inputs;
    const int8_t *left = p.column(column), *right = p.column(column + 1);
    memory_is_read(x);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < p.inputs; step += DEPTH) {
      _tile_loadd(4, x + step, p.inputs);
      _tile_loadd(6, left + step * COLUMN, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, right + step * COLUMN, 64);
      _tile_dpbssd(1, 4, 7);
    }
    _tile_stored(0, sums_[0], sizeof sums_[0]);
    _tile_stored(1, sums_[0] + COLUMN, sizeof sums_[0]);
    finish_rows(rows_, token, column);
  }

  void finish_rows(int64_t rows, int64_t token, int64_t column) {
    memory_is_read(sums_);
    for (int64_t row = 0; row < rows; ++row)
      for (int i = 0; i < PANEL * COLUMN; i += LANES)
        finish(product_, token + row, column * COLUMN + i, load<Ints>(sums_[row] + i));
  }

  const Int8Product& product_;
  int64_t rows_;
  BorrowedTiles tiles_;
  alignas(64) int32_t sums_[2 * ROWS][PANEL * COLUMN];
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

class VectorProjector {
 public:
  explicit VectorProjector(const Int8Product& product) : product_(product) {}

  void operator()(int64_t first, int64_t end, int64_t column) {
    for (; first + MOST <= end; first += MOST) few<MOST>(first, column);
    if constexpr (MOST > 4)
      if (first + 4 <= end) few<4>(first, column), first += 4;
    if (first + 2 <= end) few<2>(first, column), first += 2;
    if (first < end) few<1>(first, column);
  }

 private:
  static constexpr int PARTS = COLUMN / LANES, VECTORS = PANEL * PARTS;
  static constexpr int MOST = LANES == 16 ? 8 : 2;  // tokens whose sums fit into the registers

  template <int R>
  void few(int64_t first, int64_t column) {
    const Int8Product& p = product_;
    const int8_t* weights[PANEL] = {p.column(column), p.column(column + 1)};
    const int8_t* x = p.x.numbers + first * p.inputs;
    Ints sums[R][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = Dot::begin(p.x.sums[first + r]);
    for (int64_t input = 0; input < p.inputs; input += WORD) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        const int8_t* from = weights[v / PARTS] + input * COLUMN + v % PARTS * LANES * WORD;
        const typename Dot::Left left(load<Words>(from));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const typename Dot::Right right(load<uint32_t>(x + r * p.inputs + input));
          sums[r][v] = Dot::add(sums[r][v], left, right);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        finish(p, first + r, column * COLUMN + v * LANES, sums[r][v]);
  }

  const Int8Product& product_;
};

void round_rows(ffi::ThreadPool& pool, const LeftRows& rows, const RoundedRows& to) {
  prepare_rows(pool, rows, [&](int64_t token, const float* row, float* room) {
    round_row(row, rows.inputs, room, to.numbers + token * rows.inputs, to.scales[token],
              to.sums[token]);
  });
}

ffi::Error project(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm,
                   ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F32> w_scales,
                   ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> out, float eps) {
  const int64_t inputs = w.dimensions()[2] * DEPTH, outputs = out->dimensions()[1];
  const LeftRows rows = left_rows(x, norm, eps, inputs);
  const int64_t tokens = rows.tokens;
  if (tokens == 0) return ffi::Error::Success();
  const int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= w.dimensions()[0])
    return ffi::Error::InvalidArgument("there are no weights for this layer");
  const size_t numbers = (tokens * inputs + 63) / 64 * 64;
  char* memory = thread_memory(numbers + tokens * (sizeof(float) + sizeof(int32_t)));
  if (memory == nullptr)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for products");
  float* scales = (float*)(memory + numbers);
  const Int8Product product{{(int8_t*)memory, scales, (int32_t*)(scales + tokens)},
                            w.typed_data() + index * inputs * outputs,
                            w_scales.typed_data(),
                            out->typed_data(),
                            tokens,
                            inputs,
                            outputs};
  round_rows(pool, rows, product.x);
#if defined(HEADRACE_AMX_INT8)
  if (may_use_tiles()) {
    share_panels<TileProjector>(pool, product);
    return ffi::Error::Success();
  }
#endif
  share_panels<VectorProjector>(pool, product);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace headrace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_int8_project, headrace::project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps"));

#pragma GCC visibility pop
