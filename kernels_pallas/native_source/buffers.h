// What XLA hands over in its custom calls, as the phases want it.
#pragma once

#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "attention.h"
#include "coded_weights.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {

namespace ffi = xla::ffi;

using FloatBuffer = ffi::Buffer<ffi::F32>;
using IntBuffer = ffi::Buffer<ffi::S32>;

// Why a call cannot do what it is asked for.
struct Fault : std::runtime_error {
  Fault(ffi::ErrorCode code, const char* message) : std::runtime_error(message), code(code) {}
  const ffi::ErrorCode code;
};

inline Fault wrong_operands(const char* message) {
  return {ffi::ErrorCode::kInvalidArgument, message};
}
inline Fault lacking_memory() {
  return {ffi::ErrorCode::kResourceExhausted, "there is no memory for what a step keeps"};
}
inline Fault lacking_instructions() {
  return {ffi::ErrorCode::kUnimplemented, "this CPU has no instructions for bfloat16"};
}

// A call: operands and results one after the other, and attributes by name. It is a Fault to ask
// for what is not there, or is of another type.
class Call {
 public:
  ffi::ThreadPool& pool;

  Call(ffi::ThreadPool& pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
       ffi::Dictionary attributes)
      : pool(pool), operands_(operands), results_(results), attributes_(attributes) {}

  template <class Buffer>
  Buffer operand() {
    return checked(operands_.get<Buffer>(operand_++));
  }
  // The last one, if there is one more.
  std::optional<ffi::AnyBuffer> last_operand() {
    if (operand_ == operands_.size()) return std::nullopt;
    return operand<ffi::AnyBuffer>();
  }
  template <class Buffer>
  Buffer result() {
    return *checked(results_.get<Buffer>(result_++));
  }
  template <class T>
  T attribute(std::string_view name) const {
    return checked(attributes_.get<T>(name));
  }

 private:
  template <class T>
  static T checked(ffi::ErrorOr<T> found) {
    if (found.has_error()) throw wrong_operands(found.error().message().c_str());
    return *found;
  }

  const ffi::RemainingArgs operands_;
  const ffi::RemainingRets results_;
  const ffi::Dictionary attributes_;
  size_t operand_ = 0, result_ = 0;
};

template <void (*run)(Call&)>
ffi::Error answer(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  try {
    Call call(pool, operands, results, attributes);
    run(call);
    return ffi::Error::Success();
  } catch (const Fault& fault) {
    return ffi::Error(fault.code, fault.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory left");
  }
}

// All calls look alike to XLA, whose templates are what takes longest to compile.
#define HEADRACE_CALL(name, run)                                                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, headrace::answer<run>,                         \
                                xla::ffi::Ffi::Bind()                                \
                                    .Ctx<xla::ffi::ThreadPool>()                     \
                                    .RemainingArgs()                                 \
                                    .RemainingRets()                                 \
                                    .Attrs())

// The codes of a layer's weights in those of all, [layers, ..., lines of a group, 64]. There are
// none of any layer if they are not kept.
inline Codes codes_of(const ffi::AnyBuffer& all, int64_t layer) {
  const auto shape = all.dimensions();
  if (shape[0] == 0) return {};
  const int64_t bytes = all.size_bytes() / shape[0];
  return {(const uint8_t*)all.untyped_data() + layer * bytes, shape[shape.size() - 2]};
}

// A cache, [rows, 2, kv_heads, block_size, padded_dim], and its scales if it has some.
inline Cache cache_of(const ffi::AnyBuffer& data, const std::optional<ffi::AnyBuffer>& scales,
                      std::string_view dtype, int64_t first_block, int64_t head_dim) {
  if (!is_cache_dtype(dtype)) throw wrong_operands("the KV cache has no such dtype");
  const auto shape = data.dimensions();
  return {(char*)data.untyped_data(),
          scales ? (uint16_t*)scales->untyped_data() : nullptr,
          dtype,
          first_block,
          (int)shape[2],
          (int)head_dim,
          (int)shape[4],
          (int)shape[3]};
}

// The result that is the cache with what was written.
inline void check_in_place(const ffi::AnyBuffer& data, const ffi::AnyBuffer& result) {
  if (data.untyped_data() != result.untyped_data()) throw wrong_operands("the cache was copied");
}

inline Batch batch_of(const int32_t* slots, const IntBuffer& starts, const IntBuffer& lengths,
                      const IntBuffer& tables) {
  return {slots,
          starts.typed_data(),
          lengths.typed_data(),
          tables.typed_data(),
          (int)lengths.dimensions()[0],
          (int)tables.dimensions()[1]};
}

}  // namespace headrace
