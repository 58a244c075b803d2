// The XLA custom call of decoder layers. What lies between their products costs a pass over memory
// each in XLA, and a meeting of its threads, and so do calls that come one after the other. Here
// layers are one call, whose phases hand over what they have computed while it is in the caches.
//
// Only so many slots are computed as are asked for, not the whole bucket. And a call that has begun
// can be asked to end behind the layer at hand: another goes on with the rest of them.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
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

// Below so many multiply-adds another thread costs more than it helps.
constexpr int64_t WORK_PER_THREAD = 500000;

// What is run of a layer, as the attribute `halves` has it.
constexpr int64_t ATTENTION = 1, MLP = 2;

// The steps that should pause, by their serial numbers; no step has 0.
struct Pausing {
  int32_t first, second;

  bool contains(int32_t serial) const { return serial == first || serial == second; }
};
std::atomic<Pausing> pausing{{0, 0}};

// The row of a layer in the parameters of all, [layers, ...]; null if there are none.
const float* of_layer(const FloatBuffer& all, int64_t layer) {
  const int64_t layers = all.dimensions()[0];
  return layers == 0 ? nullptr : all.typed_data() + layer * (all.element_count() / layers);
}

// The weights of a product in all layers: [layers, outputs / 16, inputs / depth, ...].
struct Matrices {
  ffi::AnyBuffer w;
  FloatBuffer scales;
  ffi::AnyBuffer codes;

  template <class Product>
  typename Product::Weights of(int64_t layer) const {
    const auto shape = w.dimensions();
    const int64_t outputs = shape[1] * COLUMN, inputs = shape[2] * Product::DEPTH;
    const auto* of_all = (const typename Product::Number*)w.untyped_data();
    typename Product::Weights weights{of_all + layer * outputs * inputs, of_layer(scales, layer),
                                      outputs, inputs};
    if constexpr (std::is_same_v<Product, Bf16Product>) weights.codes = codes_of(codes, layer);
    return weights;
  }
};

struct AttentionParameters {
  FloatBuffer norm;
  Matrices qkv;
  FloatBuffer qkv_bias, q_norm, k_norm;
  Matrices out;
};

struct MlpParameters {
  FloatBuffer norm;
  Matrices gate_up, down;
  bool is_gelu;
};

// Where the stream comes from, and where a half goes: it is added to what is there, or stored.
struct Stream {
  const float* x;
  float* out;
  int64_t tokens, width;
  float eps;
  bool adds;

  LeftRows normalized(const FloatBuffer& norm, int64_t layer) const {
    return {x, {of_layer(norm, layer), eps}, tokens, width};
  }

  // The last product of a half.
  template <class Product, class After>
  void add_last(Phases& phases, const typename Product::Rows& rows,
                const typename Product::Weights& w, const After& after) const {
    if (adds) {
      const AddSums sums{out, w.outputs};
      add_product(phases, rows, PlannedProduct<Product, AddSums>{w, tokens, sums}, after);
    } else {
      const StoreSums sums{out, w.outputs};
      add_product(phases, rows, PlannedProduct<Product, StoreSums>{w, tokens, sums}, after);
    }
  }
};

// What does not change from layer to layer of a step's attention.
struct StepAttention {
  Cache cache;  // of the first layer
  int64_t blocks_of_layer;
  Batch batch;
  Rotation rotation;
  AttentionOptions options;
  std::shared_ptr<const AttentionPlan> plan;
};

// The rows that come out of a half, on their way into its last product: rounded when they are
// whole, or piece by piece.
template <class Product>
class GivenRows {
 public:
  using Rows = typename Product::Rows;

  GivenRows(Parts& parts, int64_t tokens, int64_t inputs)
      : tokens_(tokens),
        inputs_(inputs),
        rows_at_(parts.add<char>(Rows::bytes(tokens, inputs))),
        numbers_at_(parts.add<float>(Rows::TAKES_PIECES ? 0 : tokens * inputs)) {}

  Rows rows(char* memory) const { return Rows::at(memory + rows_at_, tokens_, inputs_); }
  float* numbers(char* memory) const { return (float*)(memory + numbers_at_); }

  void add_rounding(Phases& phases, char* memory) const {
    if constexpr (!Rows::TAKES_PIECES)
      headrace::add_rounding(phases, LeftRows{numbers(memory), {}, tokens_, inputs_}, rows(memory));
  }

 private:
  const int64_t tokens_, inputs_;
  const size_t rows_at_, numbers_at_;
};

template <class Product>
class AttentionHalf {
 public:
  AttentionHalf(Parts& parts, const Stream& stream, const AttentionParameters& parameters,
                const StepAttention& step)
      : stream_(stream),
        parameters_(parameters),
        step_(step),
        to_qkv_(parameters.qkv.of<Product>(0)),
        rows_at_(parts.add<char>(Rows::bytes(stream.tokens, stream.width))),
        qkv_at_(parts.add<float>(stream.tokens * to_qkv_.outputs)),
        attended_(parts, stream.tokens, parameters.out.of<Product>(0).inputs) {}

  // Slots without a token attend to nothing.
  void clear_unused(char* memory) const {
    const int64_t width = parameters_.out.of<Product>(0).inputs;
    const int64_t used = std::min(step_.batch.num_tokens(), stream_.tokens) * width;
    const int64_t unused = stream_.tokens * width - used;
    if constexpr (Rows::TAKES_PIECES)
      std::fill_n(attended_.rows(memory).numbers + used, unused, 0);
    else std::fill_n(attended_.numbers(memory) + used, unused, 0.0f);
  }

  // The first product; without weights behind the last layer.
  PlannedProduct<Product, StoreSums> first(char* memory, int64_t layer) const {
    const StoreSums sums{(float*)(memory + qkv_at_), to_qkv_.outputs};
    const bool is_there = layer < parameters_.norm.dimensions()[0];
    return {is_there ? parameters_.qkv.of<Product>(layer) : typename Product::Weights{},
            stream_.tokens, sums};
  }

  // `after` is the product that comes after the half.
  template <class After>
  void add(Phases& phases, char* memory, int64_t layer, const After& after,
           Failure& failure) const {
    const auto to_out = parameters_.out.of<Product>(layer);
    const Rows rows = Rows::at(memory + rows_at_, stream_.tokens, stream_.width);
    const float* qkv = (const float*)(memory + qkv_at_);
    const int64_t q_size = to_out.inputs, kv_size = (to_qkv_.outputs - q_size) / 2;
    const float* bias = of_layer(parameters_.qkv_bias, layer);
    const auto heads = [&](int64_t first, const FloatBuffer* norms, bool rotated) {
      return Heads{qkv + first,
                   to_qkv_.outputs,
                   bias == nullptr ? nullptr : bias + first,
                   {norms == nullptr ? nullptr : of_layer(*norms, layer), stream_.eps},
                   rotated ? step_.rotation : Rotation{},
                   step_.cache.head_dim};
    };
    Cache cache = step_.cache;
    cache.first_block += layer * step_.blocks_of_layer;
    AttentionOut out{attended_.numbers(memory), nullptr};
    if constexpr (Rows::TAKES_PIECES) out.rounded = attended_.rows(memory).numbers;

    add_rounding(phases, stream_.normalized(parameters_.norm, layer), rows);
    const PlannedProduct<Product, AddSums> last{to_out, stream_.tokens, {}};
    add_product(phases, rows, first(memory, layer), last);
    add_write(phases, cache, heads(q_size, &parameters_.k_norm, true),
              heads(q_size + kv_size, nullptr, false), step_.batch.slots, stream_.tokens);
    add_attention(phases, cache, step_.batch, heads(0, &parameters_.q_norm, true),
                  q_size / kv_size, step_.options, step_.plan, out, failure);
    attended_.add_rounding(phases, memory);
    stream_.add_last<Product>(phases, attended_.rows(memory), to_out, after);
  }

 private:
  using Rows = typename Product::Rows;

  const Stream& stream_;
  const AttentionParameters& parameters_;
  const StepAttention& step_;
  const typename Product::Weights to_qkv_;  // of any layer
  const size_t rows_at_, qkv_at_;
  const GivenRows<Product> attended_;
};

template <class Product>
class MlpHalf {
 public:
  MlpHalf(Parts& parts, const Stream& stream, const MlpParameters& parameters)
      : stream_(stream),
        parameters_(parameters),
        rows_at_(parts.add<char>(Rows::bytes(stream.tokens, stream.width))),
        gated_(parts, stream.tokens, parameters.down.of<Product>(0).inputs) {}

  // The first product.
  auto first(char* memory, int64_t layer) const {
    const Rows gated = gated_.rows(memory);
    float* numbers = gated_.numbers(memory);
    const auto put = [=](int64_t token, int64_t first, Floats x) {
      if constexpr (Rows::TAKES_PIECES) gated.put(token, first, x);
      else store(numbers + token * gated.inputs + first, x);
    };
    using Sums = GateSums<decltype(put)>;
    return PlannedProduct<Product, Sums>{parameters_.gate_up.of<Product>(layer), stream_.tokens,
                                         Sums{put, gated.inputs, parameters_.is_gelu}};
  }

  // `after` is the product that comes after the half.
  template <class After>
  void add(Phases& phases, char* memory, int64_t layer, const After& after) const {
    const auto down = parameters_.down.of<Product>(layer);
    const Rows rows = Rows::at(memory + rows_at_, stream_.tokens, stream_.width);
    const PlannedProduct<Product, AddSums> last{down, stream_.tokens, {}};
    add_rounding(phases, stream_.normalized(parameters_.norm, layer), rows);
    add_product(phases, rows, first(memory, layer), last);
    gated_.add_rounding(phases, memory);
    stream_.add_last<Product>(phases, gated_.rows(memory), down, after);
  }

 private:
  using Rows = typename Product::Rows;

  const Stream& stream_;
  const MlpParameters& parameters_;
  const size_t rows_at_;
  const GivenRows<Product> gated_;
};

// Calls f with the kind of products that the weights are for.
template <class F>
void with_product(const ffi::AnyBuffer& w, const F& f) {
  if (w.element_type() == ffi::S8) return f(Int8Product{});
  if (w.element_type() != ffi::BF16) throw wrong_operands("no products of that dtype");
  if (!Bf16Product::can_run()) throw lacking_instructions();
  f(Bf16Product{});
}

Matrices matrices_of(Call& call) {
  return {call.operand<ffi::AnyBuffer>(), call.operand<FloatBuffer>(),
          call.operand<ffi::AnyBuffer>()};
}

void run_layers(Call& call) {
  const auto x = call.operand<FloatBuffer>();
  const auto data = call.operand<ffi::AnyBuffer>();
  const Rotation rotation{call.operand<FloatBuffer>().typed_data(),
                          call.operand<FloatBuffer>().typed_data()};
  const auto num_slots = call.operand<IntBuffer>(), slots = call.operand<IntBuffer>();
  const auto starts = call.operand<IntBuffer>(), lengths = call.operand<IntBuffer>();
  const auto tables = call.operand<IntBuffer>();
  const auto which = call.operand<IntBuffer>();  // the first layer, and the one behind the last
  const int32_t serial = call.operand<IntBuffer>().typed_data()[0];
  const AttentionParameters attention{call.operand<FloatBuffer>(), matrices_of(call),
                                      call.operand<FloatBuffer>(), call.operand<FloatBuffer>(),
                                      call.operand<FloatBuffer>(), matrices_of(call)};
  const MlpParameters mlp{call.operand<FloatBuffer>(), matrices_of(call), matrices_of(call),
                          call.attribute<bool>("is_gelu")};
  const auto scales = call.last_operand();
  const auto out = call.result<FloatBuffer>();
  check_in_place(data, call.result<ffi::AnyBuffer>());
  int32_t& reached = call.result<IntBuffer>().typed_data()[0];
  const auto halves = call.attribute<int64_t>("halves");
  const auto adds = call.attribute<bool>("adds");
  const Cache cache = cache_of(data, scales, call.attribute<std::string_view>("dtype"), 0,
                               call.attribute<int64_t>("head_dim"));
  const int64_t num_layers = attention.norm.dimensions()[0];
  const int64_t first = which.typed_data()[0], end = which.typed_data()[1];
  if (first < 0 || first > end || end > num_layers)
    throw wrong_operands("there are no weights for these layers");
  const auto shape = x.dimensions();
  const int64_t tokens = std::min<int64_t>(num_slots.typed_data()[0], shape[0]), width = shape[1];

  // What is added to begins as the residual stream; XLA may have put the result in its place.
  float* to = out.typed_data();
  if (adds && to != x.typed_data()) std::memcpy(to, x.typed_data(), x.size_bytes());
  if (!adds) std::memset(to, 0, x.size_bytes());  // padding is finite
  if (serial != 0 && pausing.load().contains(serial)) {
    reached = first;
    return;
  }
  const Stream stream{
      adds ? to : x.typed_data(), to, tokens, width, call.attribute<float>("eps"), adds};

  with_product(attention.qkv.w, [&](auto product) {
    using Product = decltype(product);
    const int64_t q_size = attention.out.of<Product>(0).inputs;
    const int64_t qkv_size = attention.qkv.of<Product>(0).outputs;
    StepAttention step{cache,
                       data.dimensions()[0] / num_layers,
                       batch_of(slots.typed_data(), starts, lengths, tables),
                       rotation,
                       {call.attribute<float>("scale"), call.attribute<int64_t>("sliding_window"),
                        call.attribute<float>("soft_cap")},
                       nullptr};
    int64_t work = 0;
    if (halves & ATTENTION) {
      const int group = q_size / ((qkv_size - q_size) / 2);
      step.plan = plan_attention(cache, step.batch, group, step.options);
      work += work_of(*step.plan) + tokens * width * (qkv_size + q_size);
    }
    if (halves & MLP) work += tokens * width * mlp.down.of<Product>(0).inputs * 3;

    Parts parts;
    const AttentionHalf<Product> attention_half(parts, stream, attention, step);
    const MlpHalf<Product> mlp_half(parts, stream, mlp);
    const CallMemory kept(parts.bytes());
    char* memory = kept.data();
    if (memory == nullptr) throw lacking_memory();
    Phases phases;
    Failure failure;
    if (halves & ATTENTION) attention_half.clear_unused(memory);
    for (int64_t layer = first; layer < end; ++layer) {
      const auto mlp_first = mlp_half.first(memory, layer);
      if (halves & ATTENTION) attention_half.add(phases, memory, layer, mlp_first, failure);
      const auto next_first = attention_half.first(memory, layer + 1);
      if (halves & MLP) mlp_half.add(phases, memory, layer, next_first);
      if (serial != 0 && layer + 1 < end)
        phases.may_end(layer + 1, [=] { return pausing.load().contains(serial); });
    }
    phases.run(call.pool, work / WORK_PER_THREAD + 1);
    reached = phases.ended_at().value_or(end);
    if (failure.lacks_memory) throw lacking_memory();
  });
}

}  // namespace
}  // namespace headrace

#pragma GCC visibility push(default)

HEADRACE_CALL(headrace_layers, headrace::run_layers);

extern "C" void headrace_pause(int32_t first, int32_t second) {
  headrace::pausing = {first, second};
}

#pragma GCC visibility pop
