// Products of activations with weights of eight bits that lie packed since they were loaded:
//
//     sums[tokens][outputs] = rounded rows[tokens][inputs] . w[outputs][inputs]^T, and scales
//
// Packed, w is [outputs / 16][inputs / 64][16][16][4]: four inputs together, sixteen outputs side
// by side, which is the right operand of the instructions for eight bits. Sums are integers and
// exact in every order; scales are multiplied in one, that of the token before that of the output.
// So every path has the same bits, XLA's included.
#pragma once

#include <cstdint>
#include <memory>

#include "int8_rows.h"
#include "panels.h"

namespace headrace {

struct Int8Product {
  using Number = int8_t;

  static constexpr int DEPTH = 64;  // inputs of a tile
  static constexpr int WORD = 4;    // numbers in a word of a row, or of weights

  static_assert(DEPTH == ROTATED, "a row has whole tiles exactly if it can be rotated");

  // Rows that have been rotated and rounded, each as a whole.
  struct Rows {
    static constexpr bool TAKES_PIECES = false;
    RoundedRows rows;
    int64_t inputs;

    static size_t bytes(int64_t tokens, int64_t inputs) {
      return numbers_bytes(tokens, inputs) + tokens * (sizeof(float) + sizeof(int32_t));
    }
    static Rows at(char* memory, int64_t tokens, int64_t inputs) {
      float* scales = (float*)(memory + numbers_bytes(tokens, inputs));
      return {{(int8_t*)memory, scales, (int32_t*)(scales + tokens)}, inputs};
    }
    static size_t numbers_bytes(int64_t tokens, int64_t inputs) {
      return (tokens * inputs + 63) / 64 * 64;
    }

    const int8_t* row(int64_t token) const { return rows.numbers + token * inputs; }
    void round(int64_t token, const float* row, float* room) const {
      round_row(row, inputs, room, rows.numbers + token * inputs, rows.scales[token],
                rows.sums[token]);
    }
  };

  struct Weights {
    const int8_t* w;
    const float* scales;
    int64_t outputs, inputs;

    const int8_t* column(int64_t index) const { return w + index * inputs * COLUMN; }
    int64_t column_bytes() const { return inputs * COLUMN; }
  };

  static bool can_run() { return true; }

  static PanelMemory memory(const Weights& w, int64_t, const Columns& columns) {
    return columns.in(w);
  }

  // In the calling thread.
  static std::unique_ptr<Multiplying> new_multiplying(const Rows& x, const Weights& w,
                                                      int64_t tokens);
};

}  // namespace headrace
