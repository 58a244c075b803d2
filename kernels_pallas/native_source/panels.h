// How products with packed weights share their work, by panels of outputs and by tokens, and where
// their sums go.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "ahead.h"
#include "vectors.h"
#include "workers.h"

namespace headrace {

constexpr int COLUMN = 16;             // outputs side by side
constexpr int ROWS = 16;               // tokens of a tile
constexpr int PANEL = 2;               // columns that are computed together
constexpr int WIDTH = PANEL * COLUMN;  // outputs of a panel

// A sink says which columns of the weights are a panel, and takes the sums of some tokens with
// them: sums[row * WIDTH + output] is of token + row. Each token comes once for each panel. One
// that COMPUTES much is best called while other sums are computed.

// The sums themselves: out[token][output], or out[places[token]][output].
struct StoreSums {
  static constexpr bool COMPUTES = false;
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
  static constexpr bool COMPUTES = false;
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

// The largest of some sums, and the first output that has it.
struct Largest {
  float value;
  int32_t output;
};

// Of each panel's sums: largest[panel][token].
struct KeepLargest {
  static constexpr bool COMPUTES = true;
  Largest* largest;
  int64_t tokens;

  static int64_t column(int64_t panel, int which) { return panel * PANEL + which; }

  void operator()(int64_t token, int64_t rows, int64_t panel, const float* sums) const {
    Largest* to = largest + panel * tokens + token;
    for (; rows > 0; --rows, ++to, sums += WIDTH) {
      Floats highest = all(-std::numeric_limits<float>::infinity());
      for (int i = 0; i < WIDTH; i += LANES) highest = larger(load<Floats>(sums + i), highest);
      const float value = largest_lane(highest);
      *to = {value, (int32_t)(panel * WIDTH + first_equal(sums, WIDTH, value))};
    }
  }
};

// The weights are those of a gate, and then as many of what it lets through. Puts
// activation(gate) * up, in pieces of LANES, where `put(token, first output, numbers)` wants them.
template <class Put>
struct GateSums {
  static constexpr bool COMPUTES = true;
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

// Tokens that are computed together.
constexpr int TOGETHER = 2 * ROWS;
// Tokens that one thread takes through a panel at most, and the bytes of their rows: these stay in
// its second cache.
constexpr int64_t TOKENS_AT_ONCE = 256, BYTES_AT_ONCE = 1 << 20;

// The weights of a panel, where they lie: so many bytes for each column.
struct PanelMemory {
  const char* columns[PANEL] = {};
  int64_t bytes = 0;
};

// Some panels and tokens of a product, and what is read after them, as far as that is known.
struct Share {
  int64_t first_token, end_token, first_panel, end_panel;
  PanelMemory then;
};

// What multiplies, in each thread for itself.
class Multiplying {
 public:
  // A sink of any kind.
  class Sums {
   public:
    virtual int64_t column(int64_t panel, int which) const = 0;
    virtual void take(int64_t token, int64_t rows, int64_t panel, const float* sums) const = 0;
    virtual bool computes() const = 0;

   protected:
    ~Sums() = default;
  };

  virtual ~Multiplying() = default;
  // Hands over the sums of at most TOKENS_AT_ONCE tokens, up to TOGETHER at a time.
  virtual void operator()(const Share& share, const Sums& sums) = 0;
};

// The columns of a panel, by their indexes.
struct Columns {
  int64_t index[PANEL];

  template <class Sink>
  static Columns of(const Sink& sink, int64_t panel) {
    Columns columns;
    for (int i = 0; i < PANEL; ++i) columns.index[i] = sink.column(panel, i);
    return columns;
  }

  // Where they lie in weights, with column(index) and column_bytes().
  template <class Weights>
  PanelMemory in(const Weights& w) const {
    PanelMemory memory;
    for (int i = 0; i < PANEL; ++i) memory.columns[i] = (const char*)w.column(index[i]);
    memory.bytes = w.column_bytes();
    return memory;
  }
};

// The weights of the panel that comes next, asked for in equal steps.
class NextPanel {
 public:
  // There will be so many steps.
  void begin(const PanelMemory& panel, int64_t steps) {
    panel_ = panel;
    lines_ = panel.bytes / LINE_BYTES;
    in_step_ = (lines_ + steps - 1) / steps;
  }

  HEADRACE_INLINE void ask() {
    for (int64_t n = std::min(in_step_, lines_); n > 0; --n, --lines_)
      for (const char*& line : panel_.columns) {
        __builtin_prefetch(line, 0, NEARNESS);
        line += LINE_BYTES;
      }
  }

 private:
  PanelMemory panel_;
  int64_t lines_ = 0, in_step_ = 0;  // of each column
};

template <class Sink>
class SumsTo final : public Multiplying::Sums {
 public:
  explicit SumsTo(const Sink& sink) : sink_(sink) {}

  int64_t column(int64_t panel, int which) const override { return sink_.column(panel, which); }
  void take(int64_t token, int64_t rows, int64_t panel, const float* sums) const override {
    sink_(token, rows, panel, sums);
  }
  bool computes() const override { return Sink::COMPUTES; }

 private:
  const Sink& sink_;
};

// How a product is shared out: parts of the tokens, and runs of panels. The tasks are all runs of
// the first part, and so on.
struct Division {
  int64_t panels, run, runs, parts, in_part;

  Division(int64_t tokens, int64_t outputs, int64_t row_bytes) : panels(outputs / WIDTH) {
    // In wholes of what is computed together: so no part is left without tokens.
    const int64_t fitting = BYTES_AT_ONCE / row_bytes / TOGETHER * TOGETHER;
    const int64_t most = std::clamp<int64_t>(fitting, TOGETHER, TOKENS_AT_ONCE);
    parts = (tokens + most - 1) / most;
    in_part = (tokens + parts * TOGETHER - 1) / (parts * TOGETHER) * TOGETHER;
    // Few large shares: weights that follow each other are read by one thread.
    run = std::max<int64_t>(1, std::min<int64_t>(8, panels * parts / 12));
    runs = (panels + run - 1) / run;
  }

  int64_t tasks() const { return runs * parts; }
  int64_t first_panel(int64_t task) const { return task % runs * run; }
};

// One of Bf16Product and Int8Product, whose rows and sums are still to come. Others may tell their
// threads what they will read of it.
template <class Product, class Sink>
struct PlannedProduct {
  typename Product::Weights w;
  int64_t tokens;
  Sink sink;

  Division division() const {
    return {tokens, w.outputs, w.inputs * (int64_t)sizeof(typename Product::Number)};
  }
  PanelMemory panel(int64_t index) const {
    return Product::memory(w, tokens, Columns::of(sink, index));
  }
  // What a thread reads first that begins at home; nothing if there are no weights.
  PanelMemory first_at(const Phases::Home& home) const {
    if (w.w == nullptr) return {};
    const Division division = this->division();
    return panel(division.first_panel(division.tasks() * home.range / home.ranges));
  }
};

// Nothing that is known.
struct NoProduct {
  PanelMemory first_at(const Phases::Home&) const { return {}; }
};

// Adds a product of rows with weights. `after` is the one that comes after it.
template <class Product, class Sink, class After = NoProduct>
void add_product(Phases& phases, const typename Product::Rows& x,
                 const PlannedProduct<Product, Sink>& product, const After& after = {}) {
  const Division division = product.division();
  phases.add_foreseen(division.tasks(), [=] {
    auto multiply = Product::new_multiplying(x, product.w, product.tokens);
    return [=, multiply = std::move(multiply)](int64_t task, int64_t next,
                                               const Phases::Home& home) {
      const int64_t token = task / division.runs * division.in_part;
      const int64_t panel = division.first_panel(task);
      const NoSubnormals no_subnormals;
      (*multiply)({token, std::min(token + division.in_part, product.tokens), panel,
                   std::min(panel + division.run, division.panels),
                   next == Phases::NO_TASK ? after.first_at(home)
                                           : product.panel(division.first_panel(next))},
                  SumsTo<Sink>(product.sink));
    };
  });
}

}  // namespace headrace
