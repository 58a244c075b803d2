// How products with packed weights share their work: by panels of outputs, and by tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {

constexpr int COLUMN = 16;  // outputs side by side
constexpr int ROWS = 16;    // tokens of a tile
constexpr int PANEL = 2;    // columns that are computed together

// Makes a Projector(product) in each thread, and calls it with tokens [first, end) and the column
// of a panel until all have been.
template <class Projector, class Product>
void share_panels(xla::ffi::ThreadPool& pool, const Product& product) {
  // Tokens that one thread takes at a time, and those that go through a panel of weights together:
  // what they need is in the nearest caches, and what follows each other is written together.
  constexpr int64_t TOKENS_AT_ONCE = 128, TOKENS_TOGETHER = 2 * ROWS;
  // Below so many multiply-adds another thread costs more than it helps.
  constexpr int64_t WORK_PER_THREAD = 500000;
  const int64_t panels = product.outputs / (PANEL * COLUMN);
  const int64_t parts = (product.tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
  // Few large shares: weights that follow each other are read by one thread.
  const int64_t run = std::max<int64_t>(1, std::min<int64_t>(8, panels * parts / 12));
  const int64_t runs = (panels + run - 1) / run;
  const int64_t work = product.tokens * product.inputs * product.outputs;
  share(pool, runs * parts, work / WORK_PER_THREAD + 1, [&] {
    return [&, projector = std::make_unique<Projector>(product)](int64_t index) {
      const int64_t end = std::min((index / runs + 1) * TOKENS_AT_ONCE, product.tokens);
      const int64_t last_panel = std::min((index % runs + 1) * run, panels);
      for (int64_t first = index / runs * TOKENS_AT_ONCE; first < end; first += TOKENS_TOGETHER)
        for (int64_t panel = index % runs * run; panel < last_panel; ++panel)
          (*projector)(first, std::min(first + TOKENS_TOGETHER, end), panel * PANEL);
    };
  });
}

}  // namespace headrace
