// The choice of the next token of each sequence, as a phase of work.
//
// Row by row, each by one thread: a row has the same token whatever it is computed with. A row of
// temperature 0 gets its first largest logit. Others are drawn by inversion: tokens are passed in
// order until the sum of their weights e ** ((x - largest) / temperature) exceeds the uniform
// number's share of the sum of all that are kept.
//
// Top-k keeps the k most likely tokens, top-p of these the fewest that reach a share of their
// weight, min-p what has a share of the largest weight; ties with the last one stay. Thresholds
// come from histograms: a bin is a slice of the logits, so only the bin in which a threshold lies
// is sorted.

#pragma once

#include <cstdint>

#include "workers.h"

namespace headrace {

struct Sampling {
  const float* logits;  // [rows, vocab]
  int64_t vocab;
  const float *temperature, *top_p, *min_p, *uniform;
  const int32_t *top_k, *wanted;
  int32_t* out;
};

// Adds the choice of `rows` tokens; those that are not wanted are 0.
void add_sampling(Phases& phases, const Sampling& sampling, int64_t rows);

}  // namespace headrace
