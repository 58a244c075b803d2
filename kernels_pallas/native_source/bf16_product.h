// Products of activations with weights that lie packed since they were loaded:
//
//     sums[tokens][outputs] = rows[tokens][inputs] . w[outputs][inputs]^T
//
// in bfloat16 with sums in float32. Packed, w is [outputs / 16][inputs / 32][16][16][2]: pairs of
// inputs together, sixteen outputs side by side, which is the right operand of the instructions
// for bfloat16. The inputs are summed in order, so a token has the same bits whatever it is
// computed with. Weights may have the codes that they were made of beside them.
#pragma once

#include <cstdint>
#include <memory>

#include "coded_weights.h"
#include "panels.h"
#include "products.h"
#include "vectors.h"

namespace headrace {

struct Bf16Product {
  using Number = uint16_t;

  static constexpr int DEPTH = 32;  // inputs of a tile

  // Rows that have been rounded. Each piece of one can be put for itself.
  struct Rows {
    static constexpr bool TAKES_PIECES = true;
    uint16_t* numbers;
    int64_t inputs;

    static size_t bytes(int64_t tokens, int64_t inputs) { return tokens * inputs * 2; }
    static Rows at(char* memory, int64_t, int64_t inputs) { return {(uint16_t*)memory, inputs}; }

    const uint16_t* row(int64_t token) const { return numbers + token * inputs; }
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
    Codes codes = {};

    const uint16_t* column(int64_t index) const { return w + index * inputs * COLUMN; }
    int64_t column_bytes() const { return inputs * COLUMN * sizeof *w; }
  };

  // Whether the processor has the instructions.
  static bool can_run();

  // What is read of weights, with so many tokens.
  static PanelMemory memory(const Weights& w, int64_t tokens, const Columns& columns);

  // In the calling thread.
  static std::unique_ptr<Multiplying> new_multiplying(const Rows& x, const Weights& w,
                                                      int64_t tokens);
};

}  // namespace headrace
