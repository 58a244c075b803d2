// Rows of activations on their way into a product. Everything is in float32, and a row has the same
// numbers whatever it is computed with.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"
#include "workers.h"

namespace headrace {

// x / sqrt(mean of squares + eps) * scale, or x itself without a scale.
struct RowNorm {
  const float* scale;
  float eps;

  // The numbers of a row: where they are, or written to `room`.
  const float* apply(const float* from, int64_t size, float* room) const {
    if (scale == nullptr) return from;
    Floats squares = all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const Floats numbers = load<Floats>(from + i);
      squares = multiply_add(numbers, numbers, squares);
    }
    float sum = sum_of_lanes(squares);
    for (; i < size; ++i) sum += from[i] * from[i];
    const float inverse = 1.0f / std::sqrt(sum / size + eps);
    for (i = 0; i + LANES <= size; i += LANES)
      store(room + i, load<Floats>(from + i) * inverse * load<Floats>(scale + i));
    for (; i < size; ++i) room[i] = from[i] * inverse * scale[i];
    return room;
  }
};

// Rows of a matrix, through a norm if there is one.
struct LeftRows {
  const float* x;
  RowNorm norm;
  int64_t tokens, inputs;
  const int32_t* places = nullptr;  // of the rows that are meant, if they are not the first ones
};

// Adds the rounding of rows to what a product takes, in Product::Rows.
template <class Rows>
void add_rounding(Phases& phases, const LeftRows& left, const Rows& rows) {
  constexpr int64_t TOKENS_AT_ONCE = 8;
  phases.add((left.tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, [=] {
    return [=, room = std::vector<float>(2 * left.inputs),
            no_subnormals = std::make_unique<NoSubnormals>()](int64_t task) mutable {
      const int64_t end = std::min((task + 1) * TOKENS_AT_ONCE, left.tokens);
      for (int64_t token = task * TOKENS_AT_ONCE; token < end; ++token) {
        const int64_t place = left.places == nullptr ? token : left.places[token];
        const float* row = left.x + place * left.inputs;
        rows.round(token, left.norm.apply(row, left.inputs, room.data()),
                   room.data() + left.inputs);
      }
    };
  });
}

}  // namespace headrace
