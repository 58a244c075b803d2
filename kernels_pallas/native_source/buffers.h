// What XLA hands over, as the phases want it.
#pragma once

#include <cstdint>
#include <string_view>

#include "attention.h"
#include "coded_weights.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {

using FloatBuffer = xla::ffi::Buffer<xla::ffi::F32>;
using IntBuffer = xla::ffi::Buffer<xla::ffi::S32>;

// The codes of a layer's weights in those of all, [layers, ..., lines of a group, 64]. There are
// none of any layer if they are not kept.
inline Codes codes_of(const xla::ffi::AnyBuffer& all, int64_t layer) {
  const auto shape = all.dimensions();
  if (shape[0] == 0) return {};
  const int64_t bytes = all.size_bytes() / shape[0];
  return {(const uint8_t*)all.untyped_data() + layer * bytes, shape[shape.size() - 2]};
}

// A cache, [rows, 2, kv_heads, block_size, padded_dim], and its scales if it has some.
inline Cache cache_of(const xla::ffi::AnyBuffer& data, const xla::ffi::RemainingArgs& more,
                      std::string_view dtype, int64_t first_block, int64_t head_dim) {
  const auto shape = data.dimensions();
  const auto scales = more.get<xla::ffi::AnyBuffer>(0);
  return {(char*)data.untyped_data(),
          scales ? (uint16_t*)scales->untyped_data() : nullptr,
          dtype,
          first_block,
          (int)shape[2],
          (int)head_dim,
          (int)shape[4],
          (int)shape[3]};
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
