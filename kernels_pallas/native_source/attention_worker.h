// Ragged paged attention for the query rows of one sequence that share a kv head.
//
// Online softmax over tiles of KV_TILE tokens, counted from the beginning of the sequence, in
// order. What a row may not see of a tile, after its own token or before its window, it sees with
// weight zero, which changes no bit; so the result of a row depends on nothing but its sequence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "formats.h"
#include "products.h"
#include "workers.h"

namespace headrace {

// Tokens of the context per step of the online softmax. Every block size divides it.
constexpr int KV_TILE = 128;
// Query rows that are attended to together; a multiple of what the products take at once.
constexpr int MAX_ROWS = 64;
constexpr int MIN_BLOCK_SIZE = 8;
static_assert(4 * KV_TILE / MIN_BLOCK_SIZE <= Ahead::MOST, "the blocks of two tiles");
// Lines that are asked for before they are needed.
constexpr int64_t LINES_AHEAD = 512;
constexpr float MASKED = -1e30f;
constexpr float LOG2_E = 1.44269504f;

// Everything that the query rows of a step share.
struct Step {
  Cache cache;
  Batch batch;
  Heads queries;
  AttentionOptions options;
  AttentionOut out;
  Reading reading;
  int group;
};

// Query rows [first_row, end_row) of a sequence and kv head; row = token * group + head of it.
struct Item {
  int sequence, kv_head, first_row, end_row;
};

template <class Multiplier>
class Worker {
 public:
  // Without memory it does nothing but say so.
  Worker(const Step& step, Failure& failure) : step_(step) {
    const int64_t dim = step.cache.padded_dim;
    Parts parts;
    const auto reserve = [&](int64_t words) { return parts.add<uint32_t>(words); };
    const size_t queries = reserve(MAX_ROWS * Left::row_words(dim));
    const size_t scores = reserve(MAX_ROWS * KV_TILE);
    const size_t sums = reserve(MAX_ROWS * dim);
    const size_t totals = reserve(MAX_ROWS * LANES);
    const size_t room = reserve(2 * dim);
    const size_t decoded = step.reading.decode ? reserve(2 * block_words() * max_blocks()) : 0;
    // Columns of the values of a tile, or of its scores. Pointers take two words.
    const size_t right =
        reserve(2 * std::max<int64_t>(max_blocks() * (dim / LANES), KV_TILE / LANES));
    const size_t gathered = step.cache.block_size < LANES ? reserve(KV_TILE * key_steps()) : 0;
    char* memory = worker_memory(parts.bytes());
    if (memory == nullptr) {
      failure.lacks_memory = true;
      return;
    }
    has_memory_ = true;
    queries_ = (uint32_t*)(memory + queries);
    scores_ = (float*)(memory + scores);
    sums_ = (float*)(memory + sums);
    totals_ = (float*)(memory + totals);
    room_ = (float*)(memory + room);
    decoded_ = (uint32_t*)(memory + decoded);
    right_ = (const uint32_t**)(memory + right);
    gathered_ = (uint32_t*)(memory + gathered);
  }

  // Items [first, end), one after the other; `then` is the first of those that come after them, or
  // null. Blocks lie anywhere in memory: they are asked for while those before are computed.
  void operator()(const Item* first, const Item* end, const Item* then) {
    if (!has_memory_) return;
    end_ = end;
    then_ = then;
    if (foreseen_ != first) {
      ahead_.clear();
      foresee(first);
      for (int64_t lines = 0; lines < LINES_AHEAD && foresee_tile();) {
        lines += ahead_.lines();
        ahead_.ask(ahead_.lines());
      }
    }
    for (const Item* item = first; item < end; ++item) attend(*item);
  }

 private:
  using Left = typename Multiplier::Left;
  // Numbers in a word of an operand of the products.
  static constexpr int PER_WORD = Left::PER_WORD;

  // The context tokens [begin, end) that an item sees, from the beginning of a tile on.
  struct Span {
    int begin, end;
  };

  Span span(const Item& item) const {
    const int queries = step_.batch.starts[item.sequence + 1] - step_.batch.starts[item.sequence];
    const int position = step_.batch.lengths[item.sequence] - queries;
    const int64_t hidden = position + item.first_row / step_.group + 1 - step_.options.window;
    return {(int)std::max<int64_t>(hidden, 0) / KV_TILE * KV_TILE,
            position + (item.end_row - 1) / step_.group + 1};
  }

  void attend(const Item& item) {
    const int start = step_.batch.starts[item.sequence];
    const int num_queries = step_.batch.starts[item.sequence + 1] - start;
    const int first_position = step_.batch.lengths[item.sequence] - num_queries;
    const int rows = item.end_row - item.first_row;
    multiplier_.prepare(rows, step_.cache.block_size);
    load_queries(item, start);
    for (int row = 0; row < rows; ++row) {
      maxima_[row] = MASKED;
      visible_[row] = first_position + (item.first_row + row) / step_.group + 1;
      hidden_[row] = std::max<int64_t>(visible_[row] - step_.options.window, 0);
    }
    std::fill_n(totals_, rows * LANES, 0.0f);
    std::fill_n(sums_, (int64_t)rows * step_.cache.padded_dim, 0.0f);
    const auto [begin, end] = span(item);
    for (int first = begin; first < end; first += KV_TILE) {
      const int count = std::min(KV_TILE, end - first);
      while (ahead_.lines() < lines(count) && foresee_tile());
      visit(item, rows, first, count);
    }
    store_sums(item, start);
  }

  void foresee(const Item* item) {
    foreseen_ = item;
    foreseen_token_ = span(*item).begin;
  }

  // Adds the next tile to what is asked for; returns false if nobody knows which one it is.
  bool foresee_tile() {
    if (foreseen_token_ >= span(*foreseen_).end) {
      const Item* next = foreseen_ + 1 < end_ ? foreseen_ + 1 : then_;
      if (foreseen_ == then_ || next == nullptr) return false;
      foresee(next);
    }
    const Item& item = *foreseen_;
    const int32_t* table = block_table(item, foreseen_token_);
    const int count = std::min(KV_TILE, span(item).end - foreseen_token_);
    for (int which = 0; which < 2; ++which)
      for (int block = 0; block * step_.cache.block_size < count; ++block)
        ahead_.add(step_.cache.data + block_index(item, table[block], which) * block_bytes(),
                   block_bytes());
    foreseen_token_ += KV_TILE;
    return true;
  }

  const int32_t* block_table(const Item& item, int first) const {
    return step_.batch.tables + (int64_t)item.sequence * step_.batch.table_width +
           first / step_.cache.block_size;
  }

  // Index of (block, K or V, head).
  int64_t block_index(const Item& item, int32_t block, int which) const {
    return ((step_.cache.first_block + block) * 2 + which) * step_.cache.kv_heads + item.kv_head;
  }

  int64_t block_numbers() const { return (int64_t)step_.cache.block_size * step_.cache.padded_dim; }
  int64_t block_words() const { return block_numbers() / PER_WORD; }
  int64_t block_bytes() const { return block_numbers() * step_.reading.bytes; }
  // Of K and V of so many tokens.
  int64_t lines(int count) const {
    const int64_t blocks = (count + step_.cache.block_size - 1) / step_.cache.block_size;
    return 2 * blocks * ((block_bytes() + LINE_BYTES - 1) / LINE_BYTES);
  }
  int max_blocks() const { return KV_TILE / step_.cache.block_size; }
  // Steps of the products over H, and over the tokens of a block.
  int key_steps() const { return step_.cache.padded_dim / PER_WORD; }
  int value_steps() const { return step_.cache.block_size / PER_WORD; }

  void load_queries(const Item& item, int start) {
    const int padded = step_.cache.padded_dim;
    for (int row = item.first_row; row < item.end_row; ++row) {
      const float* from =
          step_.queries.row(start + row / step_.group, query_head(item, row), room_);
      from = padded_row(from);
      uint32_t* to = queries_ + (row - item.first_row) * Left::row_words(padded);
      for (int h = 0; h < padded; h += LANES)
        Left::put(to, h, finite(load<Floats>(from + h)) * step_.options.scale);
    }
  }

  int query_head(const Item& item, int row) const {
    return item.kv_head * step_.group + row % step_.group;
  }

  // With zeros after it, if it needs some.
  const float* padded_row(const float* from) {
    const int dim = step_.cache.head_dim, padded = step_.cache.padded_dim;
    if (dim == padded) return from;
    float* to = room_ + padded;
    std::copy_n(from, dim, to);
    std::fill(to + dim, to + padded, 0.0f);
    return to;
  }

  // Add a tile: context tokens [first, first + count).
  void visit(const Item& item, int rows, int first, int count) {
    const int num_blocks = (count + step_.cache.block_size - 1) / step_.cache.block_size;
    const int32_t* table = block_table(item, first);
    for (int block = 0; block < num_blocks; ++block) {
      const int64_t keys = block_index(item, table[block], 0);
      key_blocks_[block] = operand(keys, block);
      value_blocks_[block] = operand(keys + step_.cache.kv_heads, max_blocks() + block);
      if (step_.reading.scaled) {
        load_scales(keys, key_scales_ + block * step_.cache.block_size);
        load_scales(keys + step_.cache.kv_heads, value_scales_ + block * step_.cache.block_size);
      }
    }
    const int columns = (num_blocks * step_.cache.block_size + LANES - 1) / LANES;
    score(rows, num_blocks, columns);
    weigh(rows, first, columns);
    const int dim = step_.cache.padded_dim;
    const Shape shape{rows, num_blocks, value_steps(), dim / LANES, KV_TILE, dim, dim, false};
    for (int block = 0; block < num_blocks; ++block)
      for (int column = 0; column < shape.columns; ++column)
        right_[block * shape.columns + column] = value_blocks_[block] + column * LANES;
    multiplier_.multiply(shape, (const uint32_t*)scores_, right_, sums_, ahead_);
  }

  // K or V of a block as the products want it.
  const uint32_t* operand(int64_t index, int place) {
    const char* from = step_.cache.data + index * block_bytes();
    if (!step_.reading.decode) return (const uint32_t*)from;
    uint32_t* to = decoded_ + place * block_words();
    step_.reading.decode(from, to, block_numbers());
    return to;
  }

  void load_scales(int64_t index, float* to) const {
    const uint16_t* from = step_.cache.scales + index * step_.cache.block_size;
    for (int i = 0; i < step_.cache.block_size; ++i) to[i] = float_of_bfloat16(from[i]);
  }

  void score(int rows, int num_blocks, int columns) {
    Shape shape{rows,
                1,
                key_steps(),
                columns,
                Left::row_words(step_.cache.padded_dim),
                step_.cache.block_size,
                KV_TILE,
                true};
    if (step_.cache.block_size >= LANES) {
      const int per_block = step_.cache.block_size / LANES;
      for (int column = 0; column < columns; ++column)
        right_[column] = key_blocks_[column / per_block] + column % per_block * LANES;
    } else {
      gather_keys(num_blocks, columns);
      for (int column = 0; column < columns; ++column)
        right_[column] = gathered_ + column * LANES * (int64_t)shape.steps;
      shape.right_stride = LANES;
    }
    multiplier_.multiply(shape, queries_, right_, scores_, ahead_);
  }

  // Blocks narrower than a column: put several side by side.
  void gather_keys(int num_blocks, int columns) {
    const int per_column = LANES / step_.cache.block_size;
    for (int block = 0; block < columns * per_column; ++block) {
      uint32_t* to = gathered_ + block / per_column * LANES * (int64_t)key_steps() +
                     block % per_column * step_.cache.block_size;
      for (int step = 0; step < key_steps(); ++step, to += LANES) {
        if (block < num_blocks)
          std::copy_n(key_blocks_[block] + step * step_.cache.block_size, step_.cache.block_size,
                      to);
        else std::fill_n(to, step_.cache.block_size, 0);
      }
    }
  }

  // Turns scores into weights in their place, and what rows have summed so far into their scale.
  void weigh(int rows, int first, int columns) {
    for (int row = 0; row < rows; row += LANES) {
      const int end = std::min(row + LANES, rows);
      alignas(64) float highest[LANES] = {}, decays[LANES];
      for (int r = row; r < end; ++r) highest[r - row] = highest_score(r, seen(r, first, columns));
      // A decay is 1 exactly where the maximum stays.
      const Floats maxima = load<Floats>(maxima_ + row), raised = load<Floats>(highest);
      store(decays, power_of_two((maxima - raised) * LOG2_E));
      for (int r = row; r < end; ++r) {
        maxima_[r] = highest[r - row];
        weigh_row(r, seen(r, first, columns), columns, decays[r - row]);
      }
    }
  }

  // What a row sees of a tile: tokens [hidden, visible). They are in columns [begin, end), of which
  // it sees [whole, end_whole) from end to end.
  struct Seen {
    int hidden, visible, begin, end, whole, end_whole;

    // Replaces what is not seen of a column, whatever it is.
    HEADRACE_INLINE Floats hide(Floats x, int column, float by) const {
      const int before = hidden - column * LANES, rest = visible - column * LANES;
      if (rest < LANES) x = lane_numbers() < all_bits(rest) ? x : all(by);
      if (before > 0) x = lane_numbers() < all_bits(before) ? all(by) : x;
      return x;
    }
  };

  HEADRACE_INLINE Seen seen(int row, int first, int columns) const {
    const int hidden = std::max(hidden_[row] - first, 0), visible = visible_[row] - first;
    const int end = std::clamp((visible + LANES - 1) / LANES, 0, columns);
    const int begin = std::min(hidden / LANES, end);
    const int whole = std::min((hidden + LANES - 1) / LANES, end);
    return {hidden, visible, begin, end, whole, std::clamp(visible / LANES, whole, end)};
  }

  // Of those so far and of the tile, whose scores become what they count as.
  HEADRACE_INLINE float highest_score(int row, const Seen& seen) {
    float* scores = scores_ + row * KV_TILE;
    const bool scaled = step_.reading.scaled, soft = step_.options.soft_cap > 0;
    for (int column = seen.begin; (scaled || soft) && column < seen.end; ++column) {
      Floats x = load<Floats>(scores + column * LANES);
      if (scaled) x = x * load<Floats>(key_scales_ + column * LANES);
      if (soft) x = capped(x, step_.options.soft_cap);
      store(scores + column * LANES, x);
    }
    Floats highest = all(maxima_[row]);
    const auto raise = [&](int column) {
      highest = larger(seen.hide(load<Floats>(scores + column * LANES), column, MASKED), highest);
    };
    for (int column = seen.begin; column < seen.whole; ++column) raise(column);
    for (int column = seen.whole; column < seen.end_whole; ++column)
      highest = larger(load<Floats>(scores + column * LANES), highest);
    for (int column = seen.end_whole; column < seen.end; ++column) raise(column);
    return largest_lane(highest);
  }

  HEADRACE_INLINE void weigh_row(int row, const Seen& seen, int columns, float decay) {
    const float* scores = scores_ + row * KV_TILE;
    uint32_t* weights = (uint32_t*)scores_ + row * KV_TILE;
    const Floats highest = all(maxima_[row]);
    Floats total{};
    const auto weight_of = [&](int column) {
      return power_of_two((load<Floats>(scores + column * LANES) - highest) * LOG2_E);
    };
    const auto put = [&](int column) {
      Floats weight = seen.hide(weight_of(column), column, 0.0f);
      total = total + weight;
      if (step_.reading.scaled)
        weight = seen.hide(weight * load<Floats>(value_scales_ + column * LANES), column, 0.0f);
      Left::put(weights, column * LANES, weight);
    };
    for (int column = 0; column < seen.begin; ++column)
      Left::put(weights, column * LANES, Floats{});
    int column = seen.begin;
    for (; column < seen.whole; ++column) put(column);
    for (; !step_.reading.scaled && column + 2 <= seen.end_whole; column += 2) {
      const Floats weight = weight_of(column), then = weight_of(column + 1);
      total = total + weight + then;
      Left::put(weights, column * LANES, weight, then);
    }
    for (; column < seen.end; ++column) put(column);
    for (; column < columns; ++column) Left::put(weights, column * LANES, Floats{});
    float* totals = totals_ + row * LANES;
    store(totals, multiply_add(load<Floats>(totals), all(decay), total));
    if (decay == 1.0f) return;
    float* sums = sums_ + (int64_t)row * step_.cache.padded_dim;
    for (int h = 0; h < step_.cache.padded_dim; h += LANES)
      store(sums + h, load<Floats>(sums + h) * decay);
  }

  void store_sums(const Item& item, int start) {
    const int dim = step_.cache.head_dim, heads = step_.cache.kv_heads * step_.group;
    for (int row = item.first_row; row < item.end_row; ++row) {
      const int local = row - item.first_row;
      const float total = sum_of_lanes(load<Floats>(totals_ + local * LANES));
      const float* from = sums_ + (int64_t)local * step_.cache.padded_dim;
      const int64_t token = start + row / step_.group;
      const int64_t at = (token * heads + query_head(item, row)) * dim;
      // Adding zero turns -0 into 0: which of them it is depends on tiles that a row cannot see.
      int h = 0;
      for (; h + LANES <= dim; h += LANES) {
        const Floats mean = load<Floats>(from + h) / total + 0.0f;
        if (step_.out.rounded != nullptr) put_pairs((uint32_t*)(step_.out.rounded + at), h, mean);
        else store(step_.out.numbers + at + h, mean);
      }
      for (; h < dim; ++h) {
        const float mean = from[h] / total + 0.0f;
        if (step_.out.rounded != nullptr) step_.out.rounded[at + h] = bfloat16_of(mean);
        else step_.out.numbers[at + h] = mean;
      }
    }
  }

  const Step& step_;
  NoSubnormals no_subnormals_;
  Ahead ahead_;
  Multiplier multiplier_;
  bool has_memory_ = false;
  // Up to which item and token of it blocks have been added to what is asked for; `end_` and
  // `then_` say which items come before.
  const Item *foreseen_ = nullptr, *end_ = nullptr, *then_ = nullptr;
  int foreseen_token_ = 0;
  uint32_t *queries_, *decoded_, *gathered_;
  const uint32_t** right_;
  float *scores_, *sums_, *totals_;
  float* room_;  // for two heads
  alignas(64) float maxima_[MAX_ROWS];
  // A row sees positions [hidden, visible).
  int hidden_[MAX_ROWS], visible_[MAX_ROWS];
  const uint32_t *key_blocks_[KV_TILE / MIN_BLOCK_SIZE], *value_blocks_[KV_TILE / MIN_BLOCK_SIZE];
  alignas(64) float key_scales_[KV_TILE], value_scales_[KV_TILE];
};

}  // namespace headrace
