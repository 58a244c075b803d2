// The phases of attention.

#include "attention.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "attention_worker.h"
#include "formats.h"
#include "products.h"
#include "workers.h"

namespace headrace {
namespace {

// Tokens whose K and V are written by one thread at a time.
constexpr int TOKENS_AT_ONCE = 16;

// Writes tokens. Numbers are encoded in the order of H, and then go where formats.h says.
template <class Format>
class Writer {
  using Stored = typename Format::Stored;

 public:
  Writer(const Cache& cache, const Heads& keys, const Heads& values, const int32_t* slots)
      : cache_(cache),
        heads_{keys, values},
        slots_(slots),
        room_(cache.head_dim),
        encoded_(cache.padded_dim + LANES) {}

  void operator()(int64_t token) {
    const int64_t block = slots_[token] / cache_.block_size;
    if (block == 0) return;  // padding
    const int offset = slots_[token] % cache_.block_size;
    for (int which = 0; which < 2; ++which)
      for (int head = 0; head < cache_.kv_heads; ++head) {
        const float* from = heads_[which].row(token, head, room_.data());
        const int64_t index = ((cache_.first_block + block) * 2 + which) * cache_.kv_heads + head;
        encode(from, index * cache_.block_size + offset);
        Stored* to = (Stored*)cache_.data + index * cache_.block_size * cache_.padded_dim;
        which == 0 ? put_key(to, offset) : put_value(to, offset);
      }
  }

 private:
  // `scale` is the place of the scale, where there are some.
  void encode(const float* from, int64_t scale) {
    const int dim = cache_.head_dim;
    Stored* to = encoded_.data();
    if constexpr (std::is_same_v<Format, Bfloat16>) {
      int h = 0;
      for (; h + LANES <= dim; h += LANES)
        store(to + h, __builtin_convertvector(rounded(load<Floats>(from + h)), Halves));
      for (; h < dim; ++h) to[h] = Format::encode(from[h]);
    } else if constexpr (Format::SCALED) {
      float largest = 0;
      for (int h = 0; h < dim; ++h) largest = std::max(largest, std::fabs(number(from[h])));
      const uint16_t of_all = Format::scale_of(largest);
      cache_.scales[scale] = of_all;
      for (int h = 0; h < dim; ++h)
        to[h] = Format::encode(number(from[h]), float_of_bfloat16(of_all));
    } else {
      for (int h = 0; h < dim; ++h) to[h] = Format::encode(from[h]);
    }
  }

  // As Bfloat16::encode.
  static Words rounded(Floats x) {
    const float largest = float_of(0x7f7f0000);
    x = x == x ? x : all(0.0f);
    x = x > largest ? all(largest) : x;
    return round_to_bfloat16(x < -largest ? all(-largest) : x);
  }

  static float number(float x) { return within(x, std::numeric_limits<float>::max()); }

  void put_key(Stored* to, int offset) const {
    const int64_t width = cache_.block_size;
    if constexpr (Format::PAIRS) {
      struct Pair {
        Stored numbers[2];
      };
      const Pair* from = (const Pair*)encoded_.data();
      for (int pair = 0; pair < cache_.padded_dim / 2; ++pair)
        ((Pair*)to)[pair * width + offset] = from[pair];
    } else {
      for (int h = 0; h < cache_.padded_dim; ++h) to[h * width + offset] = encoded_[h];
    }
  }

  void put_value(Stored* to, int offset) const {
    if constexpr (Format::PAIRS) {
      to += (int64_t)(offset / 2) * cache_.padded_dim * 2 + offset % 2;
      for (int h = 0; h < cache_.padded_dim; ++h) to[h * 2] = encoded_[h];
    } else {
      std::copy_n(encoded_.data(), cache_.padded_dim, to + (int64_t)offset * cache_.padded_dim);
    }
  }

  const Cache cache_;
  const Heads heads_[2];
  const int32_t* slots_;
  std::vector<float> room_;
  std::vector<Stored> encoded_;  // zeros behind those of the head
  NoSubnormals no_subnormals_;
};

// Calls f with the format of that name; returns whether there is one.
template <class F>
bool with_format(std::string_view name, const F& f) {
  if (name == "bfloat16") return f(Bfloat16{}), true;
  if (name == "float32") return f(Float32{}), true;
  if (name == "float16") return f(Float16{}), true;
  if (name == "fp8_e4m3") return f(Float8E4m3{}), true;
  if (name == "fp8_e5m2") return f(Float8E5m2{}), true;
  if (name == "int8") return f(Int8{}), true;
  return false;
}

// What an item takes: to read the context takes as long as to compute some rows with it.
int64_t work_of(const Step& step, int sequence, int rows) {
  const int64_t length = step.batch.lengths[sequence];
  return (rows + 16) * std::min(length, step.options.window);
}

}  // namespace

struct AttentionPlan {
  std::vector<Item> items;
  std::vector<int> ends;  // of the shares
  int64_t work;
};

int64_t work_of(const AttentionPlan& plan) { return plan.work; }

namespace {

// Query rows of all sequences in pieces, in the order of the tokens: they lie in the caches of the
// thread that computed them. Pieces have MAX_ROWS, or fewer where that would be too large a part of
// all: a few tokens with a long context would keep one thread busy, and the others waiting.
std::vector<Item> items_of(const Step& step, int64_t* work) {
  constexpr int64_t PARTS = 12, FEWEST_ROWS = 16;
  const Batch& batch = step.batch;
  const auto rows_of = [&](int sequence) {
    if (batch.lengths[sequence] <= 0) return 0;
    return std::max(batch.starts[sequence + 1] - batch.starts[sequence], 0) * step.group;
  };
  int64_t all = 0;
  *work = 0;
  for (int sequence = 0; sequence < batch.num_seqs; ++sequence) {
    const int rows = rows_of(sequence);
    for (int first = 0; first < rows; first += MAX_ROWS)
      all += work_of(step, sequence, std::min(rows - first, MAX_ROWS)) * step.cache.kv_heads;
    const int64_t seen = std::min<int64_t>(batch.lengths[sequence], step.options.window);
    *work += rows * step.cache.kv_heads * seen * step.cache.padded_dim * 2;
  }
  std::vector<Item> items;
  for (int sequence = 0; sequence < batch.num_seqs; ++sequence) {
    const int rows = rows_of(sequence);
    if (rows == 0) continue;
    const int64_t for_a_row = work_of(step, sequence, 1) - work_of(step, sequence, 0);
    const int64_t fitting = all / PARTS / for_a_row / FEWEST_ROWS * FEWEST_ROWS;
    const int most = std::clamp<int64_t>(fitting, FEWEST_ROWS, MAX_ROWS);
    for (int first = 0; first < rows; first += most)
      for (int head = 0; head < step.cache.kv_heads; ++head)
        items.push_back({sequence, head, first, std::min(first + most, rows)});
  }
  return items;
}

// Items that follow each other, so that a thread knows what comes next: at most 16, and as few as
// make a share of the work. A chunk of a prompt has items that take as long as many decodes.
std::vector<int> share_out(const Step& step, const std::vector<Item>& items) {
  constexpr int64_t MOST = 16, SHARES = 24;
  const auto work = [&](const Item& item) {
    return work_of(step, item.sequence, item.end_row - item.first_row);
  };
  int64_t all = 0, some = 0;
  for (const Item& item : items) all += work(item);
  std::vector<int> ends{0};
  for (size_t index = 0; index < items.size(); ++index) {
    some += work(items[index]);
    const bool is_last = index + 1 == items.size();
    if (!is_last && some * SHARES < all && (int64_t)index + 1 - ends.back() < MOST) continue;
    ends.push_back(index + 1);
    some = 0;
  }
  return ends;
}

template <class Multiplier>
void add_items(Phases& phases, const Step& step, const std::shared_ptr<const AttentionPlan>& plan,
               Failure& failure) {
  phases.add_foreseen(plan->ends.size() - 1, [=, &failure] {
    return [=, worker = std::make_unique<Worker<Multiplier>>(step, failure)](
               int64_t index, int64_t next, const Phases::Home&) {
      const auto item = [&](int64_t share) { return plan->items.data() + plan->ends[share]; };
      (*worker)(item(index), item(index + 1), next == Phases::NO_TASK ? nullptr : item(next));
    };
  });
}

Step step_of(const Cache& cache, const Batch& batch, const Heads& queries, int group,
             const AttentionOptions& options, const AttentionOut& out) {
  Step step{cache, batch, queries, options, out, {}, group};
  if (options.window == 0) step.options.window = std::numeric_limits<int64_t>::max();
  return step;
}

}  // namespace

bool is_cache_dtype(std::string_view dtype) {
  return with_format(dtype, [](auto) {});
}

void add_write(Phases& phases, const Cache& cache, const Heads& keys, const Heads& values,
               const int32_t* slots, int64_t num_tokens) {
  with_format(cache.dtype, [&](auto format) {
    using Format = decltype(format);
    phases.add((num_tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, [=] {
      return
          [=, writer = std::make_unique<Writer<Format>>(cache, keys, values, slots)](int64_t part) {
            const int64_t end = std::min((part + 1) * TOKENS_AT_ONCE, num_tokens);
            for (int64_t token = part * TOKENS_AT_ONCE; token < end; ++token) (*writer)(token);
          };
    });
  });
}

std::shared_ptr<const AttentionPlan> plan_attention(const Cache& cache, const Batch& batch,
                                                    int group, const AttentionOptions& options) {
  const Step step = step_of(cache, batch, {}, group, options, {});
  AttentionPlan plan;
  plan.items = items_of(step, &plan.work);
  plan.ends = share_out(step, plan.items);
  return std::make_shared<const AttentionPlan>(std::move(plan));
}

void add_attention(Phases& phases, const Cache& cache, const Batch& batch, const Heads& queries,
                   int group, const AttentionOptions& options,
                   const std::shared_ptr<const AttentionPlan>& plan, const AttentionOut& out,
                   Failure& failure) {
  Step step = step_of(cache, batch, queries, group, options, out);
  bool pairs = false;
  with_format(cache.dtype, [&](auto format) {
    using Format = decltype(format);
    step.reading = reading_of<Format>();
    pairs = Format::PAIRS;
  });
  if (!pairs) return add_items<Multiplier<FloatProduct>>(phases, step, plan, failure);
#if defined(HEADRACE_AMX)
  if (may_use_tiles()) return add_items<TileMultiplier>(phases, step, plan, failure);
#endif
#if defined(HEADRACE_AVX512_BF16)
  add_items<Multiplier<Avx512PairProduct>>(phases, step, plan, failure);
#else
  add_items<Multiplier<PortablePairProduct>>(phases, step, plan, failure);
#endif
}

const char* bf16_instructions() {
#if defined(HEADRACE_AMX)
  if (may_use_tiles()) return "AMX";
#endif
#if defined(HEADRACE_AVX512_BF16)
  return "AVX-512 bf16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "portable";
#endif
}

}  // namespace headrace
