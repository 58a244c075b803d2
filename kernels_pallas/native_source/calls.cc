// The XLA custom calls of single operations; layer.cc has those of the layers. And how XLA's
// threads are put to work.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "attention.h"
#include "bf16_product.h"
#include "buffers.h"
#include "int8_product.h"
#include "rows.h"
#include "sampling.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {

void Phases::run(xla::ffi::ThreadPool& pool, int64_t workers) noexcept {
  const int64_t threads = std::max<int64_t>(
      std::min({workers, (int64_t)pool.num_threads(), most_tasks_, MOST_RANGES}), 1);
  for (const auto& phase : job_->phases) {
    phase->ranges = std::vector<Range>(threads);
    for (int64_t range = 0; range < threads; ++range) {
      phase->ranges[range].next = phase->total * range / threads;
      phase->ranges[range].end = phase->total * (range + 1) / threads;
    }
  }
  for (int64_t helper = 1; helper < threads; ++helper)
    pool.Schedule([job = job_] { job->take_part(); });
  job_->take_part();
}

namespace {

// Below so many multiply-adds another thread costs more than it helps.
constexpr int64_t ATTENTION_PER_THREAD = 200000, PRODUCT_PER_THREAD = 500000;

void write_kv(Call& call) {
  const auto data = call.operand<ffi::AnyBuffer>();
  const auto keys = call.operand<FloatBuffer>(), values = call.operand<FloatBuffer>();
  const auto slots = call.operand<IntBuffer>(), first_block = call.operand<IntBuffer>();
  check_in_place(data, call.result<ffi::AnyBuffer>());
  const auto shape = keys.dimensions();
  const int head_dim = shape[2];
  const Cache cache = cache_of(data, call.last_operand(), call.attribute<std::string_view>("dtype"),
                               first_block.typed_data()[0], head_dim);
  const int64_t stride = shape[1] * head_dim;
  const Heads of_keys{keys.typed_data(), stride, nullptr, {}, {}, head_dim};
  const Heads of_values{values.typed_data(), stride, nullptr, {}, {}, head_dim};
  Phases phases;
  add_write(phases, cache, of_keys, of_values, slots.typed_data(), shape[0]);
  // A number costs about as much as four multiply-adds.
  phases.run(call.pool, shape[0] * stride * 8 / ATTENTION_PER_THREAD + 1);
}

void ragged_paged_attention(Call& call) {
  const auto queries = call.operand<FloatBuffer>();
  const auto data = call.operand<ffi::AnyBuffer>();
  const auto starts = call.operand<IntBuffer>(), lengths = call.operand<IntBuffer>();
  const auto tables = call.operand<IntBuffer>(), first_block = call.operand<IntBuffer>();
  float* out = call.result<FloatBuffer>().typed_data();
  const auto shape = queries.dimensions();
  const int head_dim = shape[2];
  const Cache cache = cache_of(data, call.last_operand(), call.attribute<std::string_view>("dtype"),
                               first_block.typed_data()[0], head_dim);
  const Batch batch = batch_of(nullptr, starts, lengths, tables);
  const int64_t stride = shape[1] * head_dim;
  std::fill(out + batch.num_tokens() * stride, out + shape[0] * stride, 0.0f);
  Phases phases;
  Failure failure;
  const Heads heads{queries.typed_data(), stride, nullptr, {}, {}, head_dim};
  const AttentionOptions options{call.attribute<float>("scale"),
                                 call.attribute<int64_t>("sliding_window"),
                                 call.attribute<float>("soft_cap")};
  const int group = shape[1] / cache.kv_heads;
  const auto plan = plan_attention(cache, batch, group, options);
  add_attention(phases, cache, batch, heads, group, options, plan, {out, nullptr}, failure);
  phases.run(call.pool, work_of(*plan) / ATTENTION_PER_THREAD + 1);
  if (failure.lacks_memory) throw lacking_memory();
}

// Which rows are wanted.
std::vector<int32_t> places_of(const IntBuffer& wanted) {
  std::vector<int32_t> places;
  for (int64_t row = 0; row < wanted.dimensions()[0]; ++row)
    if (wanted.typed_data()[row] != 0) places.push_back(row);
  return places;
}

// The rows that a product is of, and where they are wanted.
struct Operands {
  LeftRows left;
  std::vector<int32_t> places;

  explicit Operands(Call& call) {
    const auto x = call.operand<FloatBuffer>(), norm = call.operand<FloatBuffer>();
    const auto wanted = call.operand<IntBuffer>();
    const float* scale = norm.element_count() == 0 ? nullptr : norm.typed_data();
    const auto shape = x.dimensions();
    left = {x.typed_data(), {scale, call.attribute<float>("eps")}, shape[0], shape[1]};
    places = places_of(wanted);
  }
};

// The weights of a product, the next operands of a call.
template <class Product>
typename Product::Weights weights_of(Call& call);

template <>
Bf16Product::Weights weights_of<Bf16Product>(Call& call) {
  const auto w = call.operand<ffi::Buffer<ffi::BF16>>();
  const auto codes = call.operand<ffi::AnyBuffer>();
  const auto shape = w.dimensions();
  return {(const uint16_t*)w.untyped_data(), nullptr, shape[1] * COLUMN,
          shape[2] * Bf16Product::DEPTH, codes_of(codes, 0)};
}

template <>
Int8Product::Weights weights_of<Int8Product>(Call& call) {
  const auto w = call.operand<ffi::Buffer<ffi::S8>>();
  const auto scales = call.operand<FloatBuffer>();
  const auto shape = w.dimensions();
  return {w.typed_data(), scales.typed_data(), shape[1] * COLUMN, shape[2] * Int8Product::DEPTH};
}

// Rounds the rows at `places`, and calls add(phases, rows, memory) with what multiplies them and so
// much memory beside them.
template <class Product, class Add>
void run_product(ffi::ThreadPool& pool, const Operands& operands,
                 const typename Product::Weights& w, size_t bytes, const Add& add) {
  LeftRows left = operands.left;
  left.tokens = operands.places.size();
  left.places = operands.places.data();
  if (left.tokens == 0) return;
  if (!Product::can_run()) throw lacking_instructions();
  Parts parts;
  const size_t rows_at = parts.add<char>(Product::Rows::bytes(left.tokens, left.inputs));
  const size_t beside_at = parts.add<char>(bytes);
  const CallMemory memory(parts.bytes());
  if (memory.data() == nullptr) throw lacking_memory();
  const auto rows = Product::Rows::at(memory.data() + rows_at, left.tokens, left.inputs);
  Phases phases;
  add_rounding(phases, left, rows);
  add(phases, rows, memory.data() + beside_at);
  phases.run(pool, left.tokens * w.inputs * w.outputs / PRODUCT_PER_THREAD + 1);
}

// What the result has in rows that are not wanted is nobody's business.
template <class Product>
void project(Call& call) {
  const Operands operands(call);
  const auto w = weights_of<Product>(call);
  float* out = call.result<FloatBuffer>().typed_data();
  const int64_t tokens = operands.places.size();
  const StoreSums sums{out, w.outputs, operands.places.data()};
  run_product<Product>(call.pool, operands, w, 0,
                       [&](Phases& phases, const typename Product::Rows& rows, char*) {
                         using Planned = PlannedProduct<Product, StoreSums>;
                         add_product(phases, rows, Planned{w, tokens, sums});
                       });
}

// Rows that are not wanted get 0, as do those without a number.
template <class Product>
void pick_largest(Call& call) {
  const Operands operands(call);
  const auto w = weights_of<Product>(call);
  int32_t* out = call.result<IntBuffer>().typed_data();
  const int32_t* places = operands.places.data();
  const int64_t tokens = operands.places.size(), panels = w.outputs / WIDTH;
  std::fill_n(out, operands.left.tokens, 0);
  run_product<Product>(
      call.pool, operands, w, panels * tokens * sizeof(Largest),
      [&](Phases& phases, const typename Product::Rows& rows, char* memory) {
        Largest* largest = (Largest*)memory;
        const KeepLargest sums{largest, tokens};
        add_product(phases, rows, PlannedProduct<Product, KeepLargest>{w, tokens, sums});
        phases.add(tokens, [=] {
          return [=](int64_t token) {
            Largest first{-std::numeric_limits<float>::infinity(), 0};
            for (int64_t panel = 0; panel < panels; ++panel) {
              const Largest& other = largest[panel * tokens + token];
              if (other.value > first.value) first = other;
            }
            out[places[token]] = first.output;
          };
        });
      });
}

void sample(Call& call) {
  const auto logits = call.operand<FloatBuffer>(), temperature = call.operand<FloatBuffer>();
  const auto top_k = call.operand<IntBuffer>();
  const auto top_p = call.operand<FloatBuffer>(), min_p = call.operand<FloatBuffer>();
  const auto uniform = call.operand<FloatBuffer>();
  const auto wanted = call.operand<IntBuffer>();
  const auto out = call.result<IntBuffer>();
  const auto shape = logits.dimensions();
  const Sampling sampling{logits.typed_data(),      shape[1],
                          temperature.typed_data(), top_p.typed_data(),
                          min_p.typed_data(),       uniform.typed_data(),
                          top_k.typed_data(),       wanted.typed_data(),
                          out.typed_data()};
  Phases phases;
  add_sampling(phases, sampling, shape[0]);
  phases.run(call.pool, shape[0]);
}

}  // namespace
}  // namespace headrace

// All that the library exports; everything else is hidden.
#pragma GCC visibility push(default)

HEADRACE_CALL(headrace_write_kv, headrace::write_kv);
HEADRACE_CALL(headrace_ragged_paged_attention, headrace::ragged_paged_attention);
HEADRACE_CALL(headrace_project, headrace::project<headrace::Bf16Product>);
HEADRACE_CALL(headrace_int8_project, headrace::project<headrace::Int8Product>);
HEADRACE_CALL(headrace_pick_largest, headrace::pick_largest<headrace::Bf16Product>);
HEADRACE_CALL(headrace_int8_pick_largest, headrace::pick_largest<headrace::Int8Product>);
HEADRACE_CALL(headrace_sample, headrace::sample);

extern "C" const char* headrace_instructions() { return headrace::bf16_instructions(); }

#pragma GCC visibility pop
