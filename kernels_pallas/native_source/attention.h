// Ragged paged attention, and the write into the cache that comes before it, as phases of work.
//
// The cache is [rows, 2, kv_heads, block_size, padded_dim]; formats.h has the order inside a block.
// Row `first_block + b` is block b of the layer at hand.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "formats.h"
#include "heads.h"
#include "vectors.h"
#include "workers.h"

namespace headrace {

// The cache of a layer.
struct Cache {
  char* data;
  uint16_t* scales;  // of 8-bit integers, else null
  std::string_view dtype;
  int64_t first_block;
  int kv_heads, head_dim, padded_dim, block_size;
};

// The packed tokens of a step.
struct Batch {
  const int32_t *slots, *starts, *lengths, *tables;
  int num_seqs, table_width;

  int64_t num_tokens() const { return starts[num_seqs]; }
};

struct AttentionOptions {
  float scale;
  int64_t window;  // tokens that a token sees, its own included; 0: all
  float soft_cap;  // 0: none
};

// Where attention goes: rows of [kv_heads * group * head_dim], of float32 or of bfloat16.
struct AttentionOut {
  float* numbers;
  uint16_t* rounded;  // instead, if not null
};

// What attention has to say in the end.
struct Failure {
  std::atomic<bool> lacks_memory{false};
};

// Whether there is a cache of that dtype.
bool is_cache_dtype(std::string_view dtype);

// Adds the write of keys and values to their slots; tokens in block 0 are padding, and not written.
void add_write(Phases& phases, const Cache& cache, const Heads& keys, const Heads& values,
               const int32_t* slots, int64_t num_tokens);

// How a step's attention is shared among threads; the same for all layers of one window.
struct AttentionPlan;

std::shared_ptr<const AttentionPlan> plan_attention(const Cache& cache, const Batch& batch,
                                                    int group, const AttentionOptions& options);

// About how many multiply-adds it takes.
int64_t work_of(const AttentionPlan& plan);

// Adds attention, as planned for the same arguments. `failure` lives until it is done.
void add_attention(Phases& phases, const Cache& cache, const Batch& batch, const Heads& queries,
                   int group, const AttentionOptions& options,
                   const std::shared_ptr<const AttentionPlan>& plan, const AttentionOut& out,
                   Failure& failure);

// The instructions that products of bfloat16 run on, for logs and people.
const char* bf16_instructions();

}  // namespace headrace
