#include "bf16_product.h"

#include <cstdint>
#include <memory>

#include "coded_weights.h"
#include "panels.h"
#include "products.h"
#include "tile_panels.h"
#include "tiles.h"
#include "vector_panels.h"

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

bool has_tiles() {
#if defined(HEADRACE_AMX)
  return may_use_tiles();
#else
  return false;
#endif
}

#if defined(HEADRACE_AVX512_BF16)

struct Pairs {
  using Number = uint16_t;
  using Sums = Floats;
  struct Left {
    Words pairs;
    explicit HEADRACE_INLINE Left(Words weights) : pairs(weights) {}
  };
  struct Right {
    Words pairs;
    explicit HEADRACE_INLINE Right(uint32_t word) : pairs(all_bits(word)) {}
  };

  Floats begin(int64_t) const { return Floats{}; }
  static HEADRACE_INLINE Floats add(Floats sums, const Left& left, const Right& right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)right.pairs, (__m512bh)left.pairs);
  }
  Floats floats(int64_t, int64_t, int, Floats sums) const { return sums; }
};

struct Vectors : Pairs {
  static constexpr bool HAS_CODES = false;

  Rows x;
  Weights w;
};

template <int BITS>
struct CodedVectors : Pairs {
  using Group = CodedGroup<BITS>;
  static constexpr bool HAS_CODES = true;

  struct Coded {
    const uint8_t* codes;
    int64_t inputs;

    explicit Coded(const Weights& w) : codes(w.codes.codes), inputs(w.inputs) {}
    const uint8_t* column(int64_t index) const { return codes + index * column_bytes(); }
    int64_t column_bytes() const { return inputs / GROUP * Group::BYTES; }
  };

  CodedVectors(const Rows& rows, const Weights& weights) : x(rows), w(weights) {}

  // Whether there are codes, and tokens go through them once. With more tokens, what is wide comes
  // in the time of the products.
  static bool are_for(const Weights& w, int64_t tokens) {
    return w.codes.lines == Group::LINES && tokens <= FITTING_TOKENS && !has_tiles();
  }

  Rows x;
  Coded w;
};

#endif

}  // namespace

bool Bf16Product::can_run() {
#if defined(HEADRACE_AVX512_BF16)
  return true;
#else
  return has_tiles();
#endif
}

PanelMemory Bf16Product::memory(const Weights& w, int64_t tokens, const Columns& columns) {
#if defined(HEADRACE_AVX512_BF16)
  if (CodedVectors<4>::are_for(w, tokens)) return columns.in(CodedVectors<4>::Coded(w));
  if (CodedVectors<8>::are_for(w, tokens)) return columns.in(CodedVectors<8>::Coded(w));
#endif
  return columns.in(w);
}

std::unique_ptr<Multiplying> Bf16Product::new_multiplying(const Rows& x, const Weights& w,
                                                          int64_t tokens) {
#if defined(HEADRACE_AMX)
  if (may_use_tiles()) return std::make_unique<TilePanels<Tiles>>(Tiles{x, w}, tokens);
#endif
#if defined(HEADRACE_AVX512_BF16)
  if (CodedVectors<4>::are_for(w, tokens))
    return std::make_unique<VectorPanels<CodedVectors<4>>>(CodedVectors<4>(x, w));
  if (CodedVectors<8>::are_for(w, tokens))
    return std::make_unique<VectorPanels<CodedVectors<8>>>(CodedVectors<8>(x, w));
  return std::make_unique<VectorPanels<Vectors>>(Vectors{{}, x, w});
#else
  return nullptr;
#endif
}

}  // namespace headrace
