// Heads of queries, keys and values on their way from a product into attention: with a bias,
// through a norm, and rotated by their position, as far as a model has these.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rows.h"
#include "vectors.h"

namespace headrace {

struct Rotation {
  const float *cosines, *sines;  // [tokens, head_dim / 2]; null: none
};

struct Heads {
  const float* numbers;
  int64_t stride;     // from one token to the next
  const float* bias;  // [heads, head_dim], or null
  RowNorm norm;
  Rotation rotation;
  int head_dim;

  // The numbers of a head: where they are, or written to `room`.
  const float* row(int64_t token, int64_t head, float* room) const {
    const float* from = numbers + token * stride + head * head_dim;
    if (bias != nullptr) {
      const float* offsets = bias + head * head_dim;
      int h = 0;
      for (; h + LANES <= head_dim; h += LANES)
        store(room + h, load<Floats>(from + h) + load<Floats>(offsets + h));
      for (; h < head_dim; ++h) room[h] = from[h] + offsets[h];
      from = room;
    }
    from = norm.apply(from, head_dim, room);
    return rotation.cosines == nullptr ? from : rotate(token, from, room);
  }

 private:
  // The first half against the second (the "neox" pairing).
  const float* rotate(int64_t token, const float* from, float* room) const {
    const int half = head_dim / 2;
    const float *cosines = rotation.cosines + token * half, *sines = rotation.sines + token * half;
    int h = 0;
    for (; h + LANES <= half; h += LANES) {
      const Floats first = load<Floats>(from + h), second = load<Floats>(from + half + h);
      const Floats cosine = load<Floats>(cosines + h), sine = load<Floats>(sines + h);
      store(room + h, first * cosine - second * sine);
      store(room + half + h, second * cosine + first * sine);
    }
    for (; h < half; ++h) {
      const float first = from[h], second = from[half + h];
      room[h] = first * cosines[h] - second * sines[h];
      room[half + h] = second * cosines[h] + first * sines[h];
    }
    return room;
  }
};

}  // namespace headrace
