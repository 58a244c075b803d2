// Rows of activations on their way into a product: as they are, through a norm, or through a gate.
//
// Everything is in float32, and a row has the same numbers whatever it is computed with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "vectors.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {

// Of rows, the numbers for which another thread is worth while, and how many one takes at a time.
constexpr int64_t NUMBERS_PER_THREAD = 16384, ROWS_PER_TASK = 8;

struct LeftRows {
  const float* x;      // [tokens][inputs], or gate and up side by side: [tokens][2 * inputs]
  const float* scale;  // of a root mean square norm, or null
  float eps;
  bool is_gated;
  int64_t tokens, inputs;

  int64_t width() const { return is_gated ? 2 * inputs : inputs; }

  // The numbers of a row: in x itself, or written to `room`.
  const float* row(int64_t token, float* room) const {
    const float* from = x + token * width();
    if (is_gated) return gate(from, room);
    return scale == nullptr ? from : normalize(from, room);
  }

 private:
  // x / sqrt(mean of squares + eps) * scale
  const float* normalize(const float* from, float* room) const {
    Floats squares = all(0.0f);
    for (int64_t i = 0; i < inputs; i += LANES) {
      const Floats numbers = load<Floats>(from + i);
      squares = multiply_add(numbers, numbers, squares);
    }
    const Floats inverse = all(1.0f / std::sqrt(sum_of_lanes(squares) / inputs + eps));
    for (int64_t i = 0; i < inputs; i += LANES)
      store(room + i, load<Floats>(from + i) * inverse * load<Floats>(scale + i));
    return room;
  }

  // silu(gate) * up, with silu(g) = g / (1 + e ** -g)
  const float* gate(const float* from, float* room) const {
    for (int64_t i = 0; i < inputs; i += LANES) {
      const Floats g = load<Floats>(from + i), up = load<Floats>(from + inputs + i);
      const Floats e = exponential(g < 0.0f ? g : -g);  // so that it cannot overflow
      const Floats sigmoid = (g < 0.0f ? e : all(1.0f)) / (1.0f + e);
      store(room + i, g * sigmoid * up);
    }
    return room;
  }
};

// What the calls of products have in common: no scales of a norm are none, and rows that are twice
// as wide as there are inputs are gated.
inline LeftRows left_rows(const xla::ffi::Buffer<xla::ffi::F32>& x,
                          const xla::ffi::Buffer<xla::ffi::F32>& norm, float eps, int64_t inputs) {
  const auto shape = x.dimensions();
  return {x.typed_data(), norm.dimensions()[0] == 0 ? nullptr : norm.typed_data(), eps,
          shape[1] == 2 * inputs, shape[0], inputs};
}

// Calls round(token, numbers, room for as many) for all rows, each once.
template <class Round>
void prepare_rows(xla::ffi::ThreadPool& pool, const LeftRows& rows, const Round& round) {
  const int64_t tasks = (rows.tokens + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
  share(pool, tasks, rows.tokens * rows.width() / NUMBERS_PER_THREAD + 1, [&] {
    return [&, room = std::make_unique<float[]>(2 * rows.inputs),
            no_subnormals = std::make_unique<NoSubnormals>()](int64_t task) {
      const int64_t end = std::min((task + 1) * ROWS_PER_TASK, rows.tokens);
      for (int64_t token = task * ROWS_PER_TASK; token < end; ++token)
        round(token, rows.row(token, room.get()), room.get() + rows.inputs);
    };
  });
}

}  // namespace headrace
