// How products with packed weights share their work, by panels of outputs and by tokens, and where
// their sums go.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "vectors.h"
#include "workers.h"

namespace headrace {

constexpr int COLUMN = 16;             // outputs side by side
constexpr int ROWS = 16;               // tokens of a tile
constexpr int PANEL = 2;               // columns that are computed together
constexpr int WIDTH = PANEL * COLUMN;  // outputs of a panel

// A sink says which columns of the weights are a panel, and takes the sums of some tokens with
// them: sums[row * WIDTH + output] is of token + row. Each token comes once for each panel.

// The sums themselves: out[token][output], or out[places[token]][output].
struct StoreSums {
  float* out;
  int64_t outputs;
  const int32_t* places = nullptr;

  static int64_t column(int64_t panel, int which) { return panel * PANEL + which; }

  void operator()(int64_t token, int64_t rows, int64_t panel, const float* sums) const {
    for (int64_t row = token; row < token + rows; ++row, sums += WIDTH) {
      float* to = out + (places == nullptr ? row : places[row]) * outputs + panel * WIDTH;
      for (int i = 0; i < WIDTH; i += LANES) store(to + i, load<Floats>(sums + i));
    }
  }
};

// out[token][output] += sum.
struct AddSums {
  float* out;
  int64_t outputs;

  static int64_t column(int64_t panel, int which) { return panel * PANEL + which; }

  void operator()(int64_t token, int64_t rows, int64_t panel, const float* sums) const {
    float* to = out + token * outputs + panel * WIDTH;
    for (; rows > 0; --rows, to += outputs, sums += WIDTH)
      for (int i = 0; i < WIDTH; i += LANES)
        store(to + i, load<Floats>(to + i) + load<Floats>(sums + i));
  }
};

// The weights are those of a gate, and then as many of what it lets through. Puts
// activation(gate) * up, in pieces of LANES, where `put(token, first output, numbers)` wants them.
template <class Put>
struct GateSums {
  Put put;
  int64_t outputs;  // of either
  bool is_gelu;

  int64_t column(int64_t panel, int which) const { return which * (outputs / COLUMN) + panel; }

  void operator()(int64_t token, int64_t rows, int64_t panel, const float* sums) const {
    for (int64_t row = 0; row < rows; ++row, sums += WIDTH)
      for (int i = 0; i < COLUMN; i += LANES) {
        const Floats gate = load<Floats>(sums + i), up = load<Floats>(sums + COLUMN + i);
        put(token + row, panel * COLUMN + i, (is_gelu ? gelu(gate) : silu(gate)) * up);
      }
  }
};

// What multiplies, in each thread for itself. Up to TOGETHER tokens go through a panel at once.
constexpr int TOGETHER = 2 * ROWS;

class Multiplying {
 public:
  virtual ~Multiplying() = default;
  // Sums of tokens [token, token + rows) with two columns of the weights: sums[row * WIDTH +
  // output].
  virtual void operator()(int64_t token, int64_t rows, const int64_t* columns, float* sums) = 0;
};

// Adds all panels of a product. make_multiplying() is called in each thread.
template <class MakeMultiplying, class Sink>
void add_panels(Phases& phases, int64_t tokens, int64_t panels, MakeMultiplying make_multiplying,
                Sink sink) {
  // Tokens that one thread takes at a time: what they need is in its caches.
  constexpr int64_t TOKENS_AT_ONCE = 512;
  const int64_t parts = (tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
  // Few large shares: weights that follow each other are read by one thread.
  const int64_t run = std::max<int64_t>(1, std::min<int64_t>(8, panels * parts / 12));
  const int64_t runs = (panels + run - 1) / run;
  phases.add(runs * parts, [=] {
    return [=, multiply = std::unique_ptr<Multiplying>(make_multiplying())](int64_t index) {
      const int64_t end = std::min((index / runs + 1) * TOKENS_AT_ONCE, tokens);
      const int64_t last_panel = std::min((index % runs + 1) * run, panels);
      alignas(64) float sums[TOGETHER * WIDTH];
      const NoSubnormals no_subnormals;
      for (int64_t first = index / runs * TOKENS_AT_ONCE; first < end; first += TOGETHER)
        for (int64_t panel = index % runs * run; panel < last_panel; ++panel) {
          const int64_t rows = std::min<int64_t>(TOGETHER, end - first);
          const int64_t columns[PANEL] = {sink.column(panel, 0), sink.column(panel, 1)};
          (*multiply)(first, rows, columns, sums);
          sink(first, rows, panel, sums);
        }
    };
  });
}

// Adds a product of rows with weights, one of Bf16Product and Int8Product.
template <class Product, class Sink>
void add_product(Phases& phases, const typename Product::Rows& x,
                 const typename Product::Weights& w, int64_t tokens, const Sink& sink) {
  add_panels(
      phases, tokens, w.outputs / WIDTH, [=] { return Product::new_multiplying(x, w, tokens); },
      sink);
}

}  // namespace headrace
