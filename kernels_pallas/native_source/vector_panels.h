// Products by vectors, whatever the format of the numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "panels.h"
#include "vectors.h"

namespace headrace {

// Tokens whose sums fit into the registers.
constexpr int FITTING_TOKENS = LANES == 16 ? 8 : 2;

// What `Format` is asked for: Sums, LANES of them in a vector; Left, a vector of weights, and
// Right, a word of a row in all lanes, each made of what lies in memory; add(sums, left, right);
// begin(token), what sums begin with; x, whose row(token) are numbers; w, with column(index),
// column_bytes() and `inputs`; and floats(token, column, first output in it, sums) as they are
// handed over. One that HAS_CODES has a Group of them, for the words of a step, which makes vectors
// of weights.
//
// Some tokens at a time go through a panel, with all their sums in registers. The weights of the
// next panel are asked for meanwhile, a few lines in each step: otherwise the core would begin to
// wait for them when it is done with these.
template <class Format>
class VectorPanels : public Multiplying {
 public:
  explicit VectorPanels(const Format& format) : format_(format) {}

  void operator()(const Share& share, const Sums& sums) override {
    alignas(64) float numbers[MOST * WIDTH];
    const int64_t tokens = share.end_token - share.first_token, times = (tokens + MOST - 1) / MOST;
    for (int64_t panel = share.first_panel; panel < share.end_panel; ++panel) {
      const Columns columns = Columns::of(sums, panel);
      const bool is_last = panel + 1 == share.end_panel;
      next_.begin(is_last ? share.then : Columns::of(sums, panel + 1).in(format_.w),
                  times * (words() / STEP));
      for (int64_t time = 0; time < times; ++time) {
        const int64_t token = tokens * time / times, rows = tokens * (time + 1) / times - token;
        some(share.first_token + token, rows, columns, numbers);
        sums.take(share.first_token + token, rows, panel, numbers);
      }
    }
  }

 private:
  using Vector = typename Format::Sums;

  static constexpr int PARTS = COLUMN / LANES, VECTORS = PANEL * PARTS;
  static constexpr int MOST = FITTING_TOKENS;
  static constexpr int STEP = 16;                   // words; every row has whole steps

  int64_t words() const { return format_.w.inputs * sizeof(typename Format::Number) / 4; }

  void some(int64_t token, int64_t rows, const Columns& columns, float* to) {
    static_assert(MOST <= 8);
    switch (rows) {
      case 1:
        return few<1>(token, columns, to);
      case 2:
        return few<2>(token, columns, to);
      case 3:
        return few<std::min(3, MOST)>(token, columns, to);
      case 4:
        return few<std::min(4, MOST)>(token, columns, to);
      case 5:
        return few<std::min(5, MOST)>(token, columns, to);
      case 6:
        return few<std::min(6, MOST)>(token, columns, to);
      case 7:
        return few<std::min(7, MOST)>(token, columns, to);
      case 8:
        return few<std::min(8, MOST)>(token, columns, to);
    }
  }

  template <int R>
  void few(int64_t first, const Columns& columns, float* to) {
    const char* weights[PANEL] = {(const char*)format_.w.column(columns.index[0]),
                                  (const char*)format_.w.column(columns.index[1])};
    const char* rows[R];
    Vector sums[R][VECTORS];
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      rows[r] = (const char*)format_.x.row(first + r);
      HEADRACE_UNROLL for (int v = 0; v < VECTORS; ++v) sums[r][v] = format_.begin(first + r);
    }
    for (int64_t step = 0; step < words(); step += STEP) {
      next_.ask();
      if constexpr (Format::HAS_CODES) {
        widen_and_add<R>(step, weights, rows, sums);
        continue;
      }
      for (int64_t word = step; word < step + STEP; ++word)
        HEADRACE_UNROLL for (int v = 0; v < VECTORS; ++v) {
          const typename Format::Left left(
              load<Words>(weights[v / PARTS] + (word * COLUMN + v % PARTS * LANES) * 4));
          HEADRACE_UNROLL for (int r = 0; r < R; ++r)
            sums[r][v] = Format::add(sums[r][v], left,
                                     typename Format::Right(load<uint32_t>(rows[r] + word * 4)));
        }
    }
    HEADRACE_UNROLL for (int r = 0; r < R; ++r)
      HEADRACE_UNROLL for (int v = 0; v < VECTORS; ++v)
        store(to + r * WIDTH + v * LANES,
              format_.floats(first + r, columns.index[v / PARTS], v % PARTS * LANES, sums[r][v]));
  }

  // A step of both columns at a time, so that a word of a row is loaded once.
  template <int R>
  HEADRACE_INLINE void widen_and_add(int64_t step, const char* const* weights,
                                     const char* const* rows, Vector (*sums)[VECTORS]) {
    const int64_t at = step / STEP * Format::Group::BYTES;
    const typename Format::Group first(weights[0] + at), second(weights[1] + at);
    constexpr int TOGETHER = Format::Group::TOGETHER;
    for (int word = 0; word < STEP; word += TOGETHER)
      HEADRACE_UNROLL for (int i = 0; i < TOGETHER; ++i) {
        const typename Format::Left left[] = {typename Format::Left(first.weights(word, i)),
                                              typename Format::Left(second.weights(word, i))};
        HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
          const typename Format::Right right(load<uint32_t>(rows[r] + (step + word + i) * 4));
          HEADRACE_UNROLL for (int v = 0; v < PANEL; ++v)
            sums[r][v] = Format::add(sums[r][v], left[v], right);
        }
      }
  }

  const Format format_;
  NextPanel next_;
};

}  // namespace headrace
