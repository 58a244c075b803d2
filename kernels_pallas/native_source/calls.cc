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

void Phases::run(xla::ffi::ThreadPool& pool, int64_t workers) {
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

namespace ffi = xla::ffi;

// Below so many multiply-adds another thread costs more than it helps.
constexpr int64_t ATTENTION_PER_THREAD = 200000, PRODUCT_PER_THREAD = 500000;

ffi::Error write_kv(ffi::ThreadPool pool, ffi::AnyBuffer data, FloatBuffer keys, FloatBuffer values,
                    IntBuffer slots, IntBuffer first_block, ffi::RemainingArgs more,
                    ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets, std::string_view dtype) {
  const auto shape = keys.dimensions();
  if (data.untyped_data() != out->untyped_data())
    return ffi::Error::InvalidArgument("the cache was copied");
  const int head_dim = shape[2];
  const Cache cache = cache_of(data, more, dtype, first_block.typed_data()[0], head_dim);
  const int64_t stride = shape[1] * head_dim;
  const Heads of_keys{keys.typed_data(), stride, nullptr, {}, {}, head_dim};
  const Heads of_values{values.typed_data(), stride, nullptr, {}, {}, head_dim};
  Phases phases;
  add_write(phases, cache, of_keys, of_values, slots.typed_data(), shape[0]);
  // A number costs about as much as four multiply-adds.
  phases.run(pool, shape[0] * stride * 8 / ATTENTION_PER_THREAD + 1);
  return ffi::Error::Success();
}

ffi::Error ragged_paged_attention(ffi::ThreadPool pool, FloatBuffer queries, ffi::AnyBuffer data,
                                  IntBuffer starts, IntBuffer lengths, IntBuffer tables,
                                  IntBuffer first_block, ffi::RemainingArgs more,
                                  ffi::ResultBuffer<ffi::F32> out, std::string_view dtype,
                                  float scale, int64_t window, float soft_cap) {
  const auto shape = queries.dimensions();
  const int head_dim = shape[2];
  const Cache cache = cache_of(data, more, dtype, first_block.typed_data()[0], head_dim);
  const Batch batch = batch_of(nullptr, starts, lengths, tables);
  const int64_t stride = shape[1] * head_dim;
  std::fill(out->typed_data() + batch.num_tokens() * stride, out->typed_data() + shape[0] * stride,
            0.0f);
  Phases phases;
  Failure failure;
  const Heads heads{queries.typed_data(), stride, nullptr, {}, {}, head_dim};
  const AttentionOptions options{scale, window, soft_cap};
  const int group = shape[1] / cache.kv_heads;
  const auto plan = plan_attention(cache, batch, group, options);
  add_attention(phases, cache, batch, heads, group, options, plan, {out->typed_data(), nullptr},
                failure);
  phases.run(pool, work_of(*plan) / ATTENTION_PER_THREAD + 1);
  if (failure.lacks_memory)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for attention");
  return ffi::Error::Success();
}

// Which rows are wanted.
std::vector<int32_t> places_of(const IntBuffer& wanted) {
  std::vector<int32_t> places;
  for (int64_t row = 0; row < wanted.dimensions()[0]; ++row)
    if (wanted.typed_data()[row] != 0) places.push_back(row);
  return places;
}

// Rounds the rows at `places`, and calls add(phases, rows, memory) with what multiplies them and so
// much memory beside them.
template <class Product, class Add>
ffi::Error run_product(ffi::ThreadPool& pool, LeftRows left, const std::vector<int32_t>& places,
                       const typename Product::Weights& w, size_t bytes, const Add& add) {
  left.tokens = places.size();
  left.places = places.data();
  if (left.tokens == 0) return ffi::Error::Success();
  if (!Product::can_run())
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "this CPU has no instructions for bfloat16");
  Parts parts;
  const size_t rows_at = parts.add<char>(Product::Rows::bytes(left.tokens, left.inputs));
  const size_t beside_at = parts.add<char>(bytes);
  const CallMemory memory(parts.bytes());
  if (memory.data() == nullptr)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for products");
  const auto rows = Product::Rows::at(memory.data() + rows_at, left.tokens, left.inputs);
  Phases phases;
  add_rounding(phases, left, rows);
  add(phases, rows, memory.data() + beside_at);
  phases.run(pool, left.tokens * w.inputs * w.outputs / PRODUCT_PER_THREAD + 1);
  return ffi::Error::Success();
}

// What the result has in rows that are not wanted is nobody's business.
template <class Product>
ffi::Error store_product(ffi::ThreadPool& pool, const LeftRows& left, const IntBuffer& wanted,
                         const typename Product::Weights& w, float* out) {
  const std::vector<int32_t> places = places_of(wanted);
  return run_product<Product>(pool, left, places, w, 0,
                              [&](Phases& phases, const typename Product::Rows& rows, char*) {
                                const StoreSums sums{out, w.outputs, places.data()};
                                add_product(phases, rows,
                                            PlannedProduct<Product, StoreSums>{
                                                w, (int64_t)places.size(), sums});
                              });
}

// Rows that are not wanted get 0, as do those without a number.
template <class Product>
ffi::Error pick_largest(ffi::ThreadPool& pool, const LeftRows& left, const IntBuffer& wanted,
                        const typename Product::Weights& w, int32_t* out) {
  const std::vector<int32_t> places = places_of(wanted);
  const int64_t tokens = places.size(), panels = w.outputs / WIDTH;
  std::fill_n(out, left.tokens, 0);
  return run_product<Product>(
      pool, left, places, w, panels * tokens * sizeof(Largest),
      [&](Phases& phases, const typename Product::Rows& rows, char* memory) {
        Largest* largest = (Largest*)memory;
        const KeepLargest sums{largest, tokens};
        add_product(phases, rows, PlannedProduct<Product, KeepLargest>{w, tokens, sums});
        phases.add(tokens, [=, &places] {
          return [=, &places](int64_t token) {
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

LeftRows left_rows(const FloatBuffer& x, const FloatBuffer& norm, float eps) {
  const auto shape = x.dimensions();
  const float* scale = norm.element_count() == 0 ? nullptr : norm.typed_data();
  return {x.typed_data(), {scale, eps}, shape[0], shape[1]};
}

Bf16Product::Weights weights_of(const ffi::Buffer<ffi::BF16>& w, const ffi::AnyBuffer& codes) {
  const auto shape = w.dimensions();
  return {(const uint16_t*)w.untyped_data(), nullptr, shape[1] * COLUMN,
          shape[2] * Bf16Product::DEPTH, codes_of(codes, 0)};
}

Int8Product::Weights weights_of(const ffi::Buffer<ffi::S8>& w, const FloatBuffer& scales) {
  const auto shape = w.dimensions();
  return {w.typed_data(), scales.typed_data(), shape[1] * COLUMN, shape[2] * Int8Product::DEPTH};
}

ffi::Error project(ffi::ThreadPool pool, FloatBuffer x, FloatBuffer norm, IntBuffer wanted,
                   ffi::Buffer<ffi::BF16> w, ffi::AnyBuffer codes,
                   ffi::ResultBuffer<ffi::F32> out, float eps) {
  return store_product<Bf16Product>(pool, left_rows(x, norm, eps), wanted, weights_of(w, codes),
                                    out->typed_data());
}

ffi::Error int8_project(ffi::ThreadPool pool, FloatBuffer x, FloatBuffer norm, IntBuffer wanted,
                        ffi::Buffer<ffi::S8> w, FloatBuffer scales, ffi::ResultBuffer<ffi::F32> out,
                        float eps) {
  return store_product<Int8Product>(pool, left_rows(x, norm, eps), wanted, weights_of(w, scales),
                                    out->typed_data());
}

ffi::Error pick_bf16(ffi::ThreadPool pool, FloatBuffer x, FloatBuffer norm, IntBuffer wanted,
                     ffi::Buffer<ffi::BF16> w, ffi::AnyBuffer codes,
                     ffi::ResultBuffer<ffi::S32> out, float eps) {
  return pick_largest<Bf16Product>(pool, left_rows(x, norm, eps), wanted, weights_of(w, codes),
                                   out->typed_data());
}

ffi::Error pick_int8(ffi::ThreadPool pool, FloatBuffer x, FloatBuffer norm, IntBuffer wanted,
                     ffi::Buffer<ffi::S8> w, FloatBuffer scales, ffi::ResultBuffer<ffi::S32> out,
                     float eps) {
  return pick_largest<Int8Product>(pool, left_rows(x, norm, eps), wanted, weights_of(w, scales),
                                   out->typed_data());
}

ffi::Error sample(ffi::ThreadPool pool, FloatBuffer logits, FloatBuffer temperature,
                  IntBuffer top_k, FloatBuffer top_p, FloatBuffer min_p, FloatBuffer uniform,
                  IntBuffer wanted, ffi::ResultBuffer<ffi::S32> out) {
  const auto shape = logits.dimensions();
  const Sampling sampling{logits.typed_data(),      shape[1],
                          temperature.typed_data(), top_p.typed_data(),
                          min_p.typed_data(),       uniform.typed_data(),
                          top_k.typed_data(),       wanted.typed_data(),
                          out->typed_data()};
  Phases phases;
  add_sampling(phases, sampling, shape[0]);
  phases.run(pool, shape[0]);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace headrace

// All that the library exports; everything else is hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_write_kv, headrace::write_kv,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<std::string_view>("dtype"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_ragged_paged_attention, headrace::ragged_paged_attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<std::string_view>("dtype")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("sliding_window")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_project, headrace::project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_int8_project, headrace::int8_project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_pick_largest, headrace::pick_bf16,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_int8_pick_largest, headrace::pick_int8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_sample, headrace::sample,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());

extern "C" const char* headrace_instructions() { return headrace::bf16_instructions(); }

#pragma GCC visibility pop
