// The XLA custom calls of the two halves of a decoder layer: what lies between its products costs a
// pass over memory each in XLA, and a meeting of its threads. Here each half is one call, whose
// phases hand over what they have computed while it is in the caches.
//
// Only so many slots are computed as are asked for, not the whole bucket.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "attention.h"
#include "bf16_product.h"
#include "buffers.h"
#include "heads.h"
#include "int8_product.h"
#include "panels.h"
#include "rows.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {
namespace {

namespace ffi = xla::ffi;

// Below so many multiply-adds another thread costs more than it helps.
constexpr int64_t WORK_PER_THREAD = 500000;

// The row of a layer in the parameters of all, [layers, ...]; null if there are none.
const float* of_layer(const FloatBuffer& all, int64_t layer) {
  const int64_t layers = all.dimensions()[0];
  return layers == 0 ? nullptr : all.typed_data() + layer * (all.element_count() / layers);
}

// The weights of a layer in those of all: [layers, outputs / 16, inputs / depth, ...].
template <class Product>
typename Product::Weights weights_of(const ffi::AnyBuffer& w, const FloatBuffer& scales,
                                     const ffi::AnyBuffer& codes, int64_t layer) {
  const auto shape = w.dimensions();
  const int64_t outputs = shape[1] * COLUMN, inputs = shape[2] * Product::DEPTH;
  const auto* of_layers = (const typename Product::Number*)w.untyped_data();
  typename Product::Weights weights{of_layers + layer * outputs * inputs, of_layer(scales, layer),
                                    outputs, inputs};
  if constexpr (std::is_same_v<Product, Bf16Product>) weights.codes = codes_of(codes, layer);
  return weights;
}

// Calls f with the kind of products that the weights are for.
template <class F>
ffi::Error with_product(const ffi::AnyBuffer& w, const F& f) {
  if (w.element_type() == ffi::S8) return f(Int8Product{});
  if (w.element_type() != ffi::BF16)
    return ffi::Error::InvalidArgument("no products of that dtype");
  if (!Bf16Product::can_run())
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "this CPU has no instructions for bfloat16");
  return f(Bf16Product{});
}

// Adds a product to what is in `out`, or stores it there.
template <class Product>
void add_last(Phases& phases, const typename Product::Rows& rows,
              const typename Product::Weights& w, int64_t tokens, float* out, bool adds) {
  if (adds) add_product<Product>(phases, rows, w, tokens, AddSums{out, w.outputs});
  else add_product<Product>(phases, rows, w, tokens, StoreSums{out, w.outputs});
}

// What is added to begins as the residual stream; XLA may have put the result in its place.
void begin(const FloatBuffer& x, float* out, bool adds) {
  if (adds && out != x.typed_data()) std::memcpy(out, x.typed_data(), x.size_bytes());
  if (!adds) std::memset(out, 0, x.size_bytes());  // padding is finite
}

ffi::Error no_layer() { return ffi::Error::InvalidArgument("there are no weights for this layer"); }

ffi::Error no_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for a layer");
}

ffi::Error attention_half(ffi::ThreadPool pool, FloatBuffer x, ffi::AnyBuffer data,
                          FloatBuffer cosines, FloatBuffer sines, IntBuffer num_slots,
                          IntBuffer slots, IntBuffer starts, IntBuffer lengths, IntBuffer tables,
                          IntBuffer layer_index, FloatBuffer norm, ffi::AnyBuffer qkv_w,
                          FloatBuffer qkv_scales, ffi::AnyBuffer qkv_codes, FloatBuffer qkv_bias,
                          FloatBuffer q_norm, FloatBuffer k_norm, ffi::AnyBuffer out_w,
                          FloatBuffer out_scales, ffi::AnyBuffer out_codes,
                          ffi::RemainingArgs more, ffi::ResultBuffer<ffi::F32> out,
                          ffi::Result<ffi::AnyBuffer> data_out, ffi::RemainingRets,
                          std::string_view dtype, int64_t num_layers, int64_t head_dim, float eps,
                          float scale, int64_t window, float soft_cap, bool adds) {
  if (data.untyped_data() != data_out->untyped_data())
    return ffi::Error::InvalidArgument("the cache was copied");
  if (!is_cache_dtype(dtype)) return ffi::Error::InvalidArgument("the KV cache has no such dtype");
  const int64_t layer = layer_index.typed_data()[0];
  if (layer < 0 || layer >= norm.dimensions()[0]) return no_layer();
  const auto shape = x.dimensions();
  const int64_t tokens = std::min<int64_t>(num_slots.typed_data()[0], shape[0]), width = shape[1];
  const int64_t first_block = layer * (data.dimensions()[0] / num_layers);
  const Cache cache = cache_of(data, more, dtype, first_block, head_dim);
  const Batch batch = batch_of(slots.typed_data(), starts, lengths, tables);
  return with_product(qkv_w, [&](auto product) {
    using Product = decltype(product);
    using Rows = typename Product::Rows;
    const auto to_qkv = weights_of<Product>(qkv_w, qkv_scales, qkv_codes, layer);
    const auto to_out = weights_of<Product>(out_w, out_scales, out_codes, layer);
    Parts parts;
    const size_t rows_at = parts.add<char>(Rows::bytes(tokens, width));
    const size_t qkv_at = parts.add<float>(tokens * to_qkv.outputs);
    const size_t attended_at = parts.add<char>(Rows::bytes(tokens, to_out.inputs));
    const size_t numbers_at = parts.add<float>(Rows::TAKES_PIECES ? 0 : tokens * to_out.inputs);
    const CallMemory kept(parts.bytes());
    char* memory = kept.data();
    if (memory == nullptr) return no_memory();
    const Rows rows = Rows::at(memory + rows_at, tokens, width);
    const Rows attended = Rows::at(memory + attended_at, tokens, to_out.inputs);
    float* qkv = (float*)(memory + qkv_at);
    AttentionOut attention_out{(float*)(memory + numbers_at), nullptr};
    if constexpr (Rows::TAKES_PIECES) attention_out.rounded = attended.numbers;
    // Slots without a token attend to nothing.
    const int64_t used = std::min(batch.num_tokens(), tokens), unused = tokens - used;
    if (attention_out.rounded != nullptr)
      std::fill_n(attention_out.rounded + used * to_out.inputs, unused * to_out.inputs, 0);
    else std::fill_n(attention_out.numbers + used * to_out.inputs, unused * to_out.inputs, 0.0f);

    const int64_t q_size = to_out.inputs, kv_size = (to_qkv.outputs - q_size) / 2;
    const float* bias = of_layer(qkv_bias, layer);
    const Rotation rotation{cosines.typed_data(), sines.typed_data()};
    const auto heads = [&](int64_t first, const FloatBuffer* norms, bool rotated) {
      return Heads{qkv + first,
                   to_qkv.outputs,
                   bias == nullptr ? nullptr : bias + first,
                   {norms == nullptr ? nullptr : of_layer(*norms, layer), eps},
                   rotated ? rotation : Rotation{},
                   (int)head_dim};
    };

    Phases phases;
    Failure failure;
    begin(x, out->typed_data(), adds);
    add_rounding(phases, LeftRows{x.typed_data(), {of_layer(norm, layer), eps}, tokens, width},
                 rows);
    add_product<Product>(phases, rows, to_qkv, tokens, StoreSums{qkv, to_qkv.outputs});
    add_write(phases, cache, heads(q_size, &k_norm, true), heads(q_size + kv_size, nullptr, false),
              batch.slots, tokens);
    int64_t work = add_attention(phases, cache, batch, heads(0, &q_norm, true), q_size / kv_size,
                                 {scale, window, soft_cap}, attention_out, failure);
    if constexpr (!Rows::TAKES_PIECES)
      add_rounding(phases, LeftRows{attention_out.numbers, {}, tokens, q_size}, attended);
    add_last<Product>(phases, attended, to_out, tokens, out->typed_data(), adds);
    work += tokens * width * (to_qkv.outputs + q_size);
    phases.run(pool, work / WORK_PER_THREAD + 1);
    return failure.lacks_memory ? no_memory() : ffi::Error::Success();
  });
}

ffi::Error mlp_half(ffi::ThreadPool pool, FloatBuffer x, IntBuffer num_slots, IntBuffer layer_index,
                    FloatBuffer norm, ffi::AnyBuffer gate_up_w, FloatBuffer gate_up_scales,
                    ffi::AnyBuffer gate_up_codes, ffi::AnyBuffer down_w, FloatBuffer down_scales,
                    ffi::AnyBuffer down_codes, ffi::ResultBuffer<ffi::F32> out, float eps,
                    bool is_gelu, bool adds) {
  const int64_t layer = layer_index.typed_data()[0];
  if (layer < 0 || layer >= norm.dimensions()[0]) return no_layer();
  const auto shape = x.dimensions();
  const int64_t tokens = std::min<int64_t>(num_slots.typed_data()[0], shape[0]), width = shape[1];
  return with_product(gate_up_w, [&](auto product) {
    using Product = decltype(product);
    using Rows = typename Product::Rows;
    const auto gate_up = weights_of<Product>(gate_up_w, gate_up_scales, gate_up_codes, layer);
    const auto down = weights_of<Product>(down_w, down_scales, down_codes, layer);
    Parts parts;
    const size_t rows_at = parts.add<char>(Rows::bytes(tokens, width));
    const size_t gated_at = parts.add<char>(Rows::bytes(tokens, down.inputs));
    const size_t numbers_at = parts.add<float>(Rows::TAKES_PIECES ? 0 : tokens * down.inputs);
    const CallMemory kept(parts.bytes());
    char* memory = kept.data();
    if (memory == nullptr) return no_memory();
    const Rows rows = Rows::at(memory + rows_at, tokens, width);
    const Rows gated = Rows::at(memory + gated_at, tokens, down.inputs);
    float* numbers = (float*)(memory + numbers_at);

    Phases phases;
    begin(x, out->typed_data(), adds);
    add_rounding(phases, LeftRows{x.typed_data(), {of_layer(norm, layer), eps}, tokens, width},
                 rows);
    const auto put = [=](int64_t token, int64_t first, Floats x) {
      if constexpr (Rows::TAKES_PIECES) gated.put(token, first, x);
      else store(numbers + token * gated.inputs + first, x);
    };
    add_product<Product>(phases, rows, gate_up, tokens,
                         GateSums<decltype(put)>{put, down.inputs, is_gelu});
    if constexpr (!Rows::TAKES_PIECES)
      add_rounding(phases, LeftRows{numbers, {}, tokens, down.inputs}, gated);
    add_last<Product>(phases, gated, down, tokens, out->typed_data(), adds);
    phases.run(pool, tokens * width * down.inputs * 3 / WORK_PER_THREAD + 1);
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace headrace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_attention_half, headrace::attention_half,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<headrace::FloatBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()    // cache
                                  .Arg<headrace::FloatBuffer>()  // cosines
                                  .Arg<headrace::FloatBuffer>()  // sines
                                  .Arg<headrace::IntBuffer>()    // number of slots
                                  .Arg<headrace::IntBuffer>()    // slots
                                  .Arg<headrace::IntBuffer>()    // starts
                                  .Arg<headrace::IntBuffer>()    // lengths
                                  .Arg<headrace::IntBuffer>()    // tables
                                  .Arg<headrace::IntBuffer>()    // layer
                                  .Arg<headrace::FloatBuffer>()  // norm
                                  .Arg<xla::ffi::AnyBuffer>()    // to q, k and v
                                  .Arg<headrace::FloatBuffer>()  // scales
                                  .Arg<xla::ffi::AnyBuffer>()    // codes
                                  .Arg<headrace::FloatBuffer>()  // bias
                                  .Arg<headrace::FloatBuffer>()  // norm of q
                                  .Arg<headrace::FloatBuffer>()  // norm of k
                                  .Arg<xla::ffi::AnyBuffer>()    // to the output
                                  .Arg<headrace::FloatBuffer>()  // scales
                                  .Arg<xla::ffi::AnyBuffer>()    // codes
                                  .RemainingArgs()               // scales of the cache
                                  .Ret<headrace::FloatBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<std::string_view>("dtype")
                                  .Attr<int64_t>("num_layers")
                                  .Attr<int64_t>("head_dim")
                                  .Attr<float>("eps")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("sliding_window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("adds"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_mlp_half, headrace::mlp_half,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<headrace::FloatBuffer>()  // x
                                  .Arg<headrace::IntBuffer>()    // number of slots
                                  .Arg<headrace::IntBuffer>()    // layer
                                  .Arg<headrace::FloatBuffer>()  // norm
                                  .Arg<xla::ffi::AnyBuffer>()    // to gate and up
                                  .Arg<headrace::FloatBuffer>()  // scales
                                  .Arg<xla::ffi::AnyBuffer>()    // codes
                                  .Arg<xla::ffi::AnyBuffer>()    // down
                                  .Arg<headrace::FloatBuffer>()  // scales
                                  .Arg<xla::ffi::AnyBuffer>()    // codes
                                  .Ret<headrace::FloatBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("is_gelu")
                                  .Attr<bool>("adds"));

#pragma GCC visibility pop
