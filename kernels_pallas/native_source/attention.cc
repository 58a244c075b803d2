// The XLA custom calls of headrace's CPU attention: the write into the KV cache, and attention
// over it. The cache is [rows, 2, kv_heads, block_size, padded_dim]; formats.h has the order inside
// a block. Row `first_block + b` is block b of the layer at hand.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "attention.h"
#include "formats.h"
#include "products.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {
namespace {

namespace ffi = xla::ffi;

// Below so many multiply-adds another thread costs more than it helps.
constexpr int64_t WORK_PER_THREAD = 200000;
// Tokens whose K and V are written by one thread at a time.
constexpr int TOKENS_AT_ONCE = 16;

template <class Format>
struct Write {
  typename Format::Stored* data;
  uint16_t* scales;
  const float *keys, *values;
  const int32_t* slots;
  int64_t first_block;
  int kv_heads, head_dim, padded_dim, block_size;

  void token(int64_t token) const {
    const int64_t block = slots[token] / block_size;
    if (block == 0) return;  // padding
    const int offset = slots[token] % block_size;
    for (int which = 0; which < 2; ++which)
      for (int head = 0; head < kv_heads; ++head) {
        const float* from =
            (which ? values : keys) + (token * kv_heads + head) * (int64_t)head_dim;
        const int64_t index = ((first_block + block) * 2 + which) * kv_heads + head;
        typename Format::Stored* to = data + index * block_size * padded_dim;
        const auto put = [&](int h, typename Format::Stored number) {
          if constexpr (Format::PAIRS) {
            const int64_t pair = which ? (int64_t)(offset / 2) * padded_dim + h
                                       : (int64_t)(h / 2) * block_size + offset;
            to[pair * 2 + (which ? offset : h) % 2] = number;
          } else {
            to[which ? (int64_t)offset * padded_dim + h : (int64_t)h * block_size + offset] =
                number;
          }
        };
        if constexpr (Format::SCALED) {
          float largest = 0;
          for (int h = 0; h < head_dim; ++h)
            largest = std::max(largest, std::fabs(finite(from[h])));
          const uint16_t scale = Format::scale_of(largest);
          scales[index * block_size + offset] = scale;
          for (int h = 0; h < head_dim; ++h)
            put(h, Format::encode(finite(from[h]), float_of_bfloat16(scale)));
        } else {
          for (int h = 0; h < head_dim; ++h) put(h, Format::encode(from[h]));
        }
        for (int h = head_dim; h < padded_dim; ++h) put(h, 0);
      }
  }

  static float finite(float x) { return within(x, std::numeric_limits<float>::max()); }
};

template <class Format>
ffi::Error write(ffi::ThreadPool& pool, Write<Format> job, int64_t num_tokens) {
  const int64_t parts = (num_tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
  // A number costs about as much as sixteen multiply-adds.
  const int64_t work = num_tokens * job.kv_heads * job.head_dim * 32;
  share(pool, parts, work / WORK_PER_THREAD + 1, [&] {
    return [&, no_subnormals = std::make_unique<NoSubnormals>()](int64_t part) {
      const int64_t end = std::min((part + 1) * TOKENS_AT_ONCE, num_tokens);
      for (int64_t token = part * TOKENS_AT_ONCE; token < end; ++token) job.token(token);
    };
  });
  return ffi::Error::Success();
}

// Query rows of all sequences, in pieces of MAX_ROWS, the longest contexts first: sequences are
// sorted by length, and prompts come last.
std::vector<Item> plan(const Step& step, int num_seqs, int64_t* work) {
  std::vector<Item> items;
  *work = 0;
  for (int sequence = num_seqs - 1; sequence >= 0; --sequence) {
    const int queries = step.starts[sequence + 1] - step.starts[sequence];
    const int rows = queries * step.group;
    if (rows <= 0 || step.lengths[sequence] <= 0) continue;
    const int64_t seen = std::min<int64_t>(step.lengths[sequence], step.window);
    *work += rows * step.kv_heads * seen * step.padded_dim * 2;
    for (int head = 0; head < step.kv_heads; ++head)
      for (int end = rows; end > 0; end -= MAX_ROWS)
        items.push_back({sequence, head, std::max(end - MAX_ROWS, 0), end});
  }
  return items;
}

template <class Multiplier>
ffi::Error attend_with(ffi::ThreadPool& pool, const Step& step, int num_seqs) {
  int64_t work;
  const std::vector<Item> items = plan(step, num_seqs, &work);
  std::atomic<bool> lacks_memory{false};
  share(pool, items.size(), work / WORK_PER_THREAD + 1, [&] {
    return [&, worker = std::make_unique<Worker<Multiplier>>(step, lacks_memory)](int64_t index) {
      (*worker)(items[index]);
    };
  });
  if (lacks_memory)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for attention");
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool& pool, const Step& step, int num_seqs, bool pairs) {
  if (!pairs) return attend_with<Multiplier<FloatProduct>>(pool, step, num_seqs);
#if defined(HEADRACE_AMX)
  if (may_use_tiles()) return attend_with<TileMultiplier>(pool, step, num_seqs);
#endif
#if defined(HEADRACE_AVX512_BF16)
  return attend_with<Multiplier<Avx512PairProduct>>(pool, step, num_seqs);
#else
  return attend_with<Multiplier<PortablePairProduct>>(pool, step, num_seqs);
#endif
}

// Calls f with the format of that name.
template <class F>
ffi::Error with_format(std::string_view name, const F& f) {
  if (name == "bfloat16") return f(Bfloat16{});
  if (name == "float32") return f(Float32{});
  if (name == "float16") return f(Float16{});
  if (name == "fp8_e4m3") return f(Float8E4m3{});
  if (name == "fp8_e5m2") return f(Float8E5m2{});
  if (name == "int8") return f(Int8{});
  return ffi::Error::InvalidArgument("the KV cache has no such dtype");
}

ffi::Error write_kv(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::Buffer<ffi::F32> keys,
                    ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> slots,
                    ffi::Buffer<ffi::S32> first_block, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out,
                    ffi::RemainingRets more, std::string_view dtype) {
  const auto cache = data.dimensions();
  const auto shape = keys.dimensions();
  if (data.untyped_data() != out->untyped_data())
    return ffi::Error::InvalidArgument("the cache was copied");
  return with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    Write<Format> job{};
    job.data = (typename Format::Stored*)out->untyped_data();
    if constexpr (Format::SCALED) {
      const auto scales = more.get<ffi::AnyBuffer>(0);
      if (!scales) return ffi::Error::InvalidArgument("int8 needs scales");
      job.scales = (uint16_t*)(*scales)->untyped_data();
    }
    job.keys = keys.typed_data();
    job.values = values.typed_data();
    job.slots = slots.typed_data();
    job.first_block = first_block.typed_data()[0];
    job.kv_heads = shape[1];
    job.head_dim = shape[2];
    job.padded_dim = cache[4];
    job.block_size = cache[3];
    return write(pool, job, shape[0]);
  });
}

ffi::Error ragged_paged_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries,
                                  ffi::AnyBuffer data, ffi::Buffer<ffi::S32> starts,
                                  ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> tables,
                                  ffi::Buffer<ffi::S32> first_block, ffi::RemainingArgs more,
                                  ffi::ResultBuffer<ffi::F32> out, std::string_view dtype,
                                  float scale, int64_t window, float soft_cap) {
  const auto cache = data.dimensions();
  const auto shape = queries.dimensions();
  Step step{};
  step.queries = queries.typed_data();
  step.out = out->typed_data();
  step.data = (const char*)data.untyped_data();
  step.starts = starts.typed_data();
  step.lengths = lengths.typed_data();
  step.tables = tables.typed_data();
  step.first_block = first_block.typed_data()[0];
  step.table_width = tables.dimensions()[1];
  step.kv_heads = cache[2];
  step.group = shape[1] / cache[2];
  step.head_dim = shape[2];
  step.padded_dim = cache[4];
  step.block_size = cache[3];
  step.scale = scale;
  step.window = window > 0 ? window : std::numeric_limits<int64_t>::max();
  step.soft_cap = soft_cap;
  const int num_seqs = lengths.dimensions()[0];
  const int64_t used = step.starts[num_seqs], row = shape[1] * shape[2];
  std::fill(step.out + used * row, step.out + shape[0] * row, 0.0f);
  return with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    step.reading = reading_of<Format>();
    if constexpr (Format::SCALED) {
      const auto scales = more.get<ffi::AnyBuffer>(0);
      if (!scales) return ffi::Error::InvalidArgument("int8 needs scales");
      step.scales = (const uint16_t*)scales->untyped_data();
    }
    return attend(pool, step, num_seqs, Format::PAIRS);
  });
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

// The instructions that products of bfloat16 run on, for logs and people.
extern "C" const char* headrace_instructions() {
#if defined(HEADRACE_AMX)
  if (headrace::may_use_tiles()) return "AMX";
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

#pragma GCC visibility pop
