// The XLA custom calls of single products with packed weights, through a norm if there is one, of
// the rows that are wanted; what the result has in other rows is nobody's business.

#include <cstdint>
#include <vector>

#include "bf16_product.h"
#include "int8_product.h"
#include "rows.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {
namespace {

namespace ffi = xla::ffi;

// Below so many multiply-adds another thread costs more than it helps.
constexpr int64_t WORK_PER_THREAD = 500000;

template <class Product>
ffi::Error run(ffi::ThreadPool& pool, LeftRows left, const ffi::Buffer<ffi::S32>& wanted,
               const typename Product::Weights& w, float* out) {
  std::vector<int32_t> places;
  for (int64_t row = 0; row < left.tokens; ++row)
    if (wanted.typed_data()[row] != 0) places.push_back(row);
  left.tokens = places.size();
  left.places = places.data();
  if (left.tokens == 0) return ffi::Error::Success();
  if (!Product::can_run())
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "this CPU has no instructions for bfloat16");
  char* memory = thread_memory<Owner::CALL>(Product::Rows::bytes(left.tokens, left.inputs));
  if (memory == nullptr)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for products");
  const auto rows = Product::Rows::at(memory, left.tokens, left.inputs);
  Phases phases;
  add_rounding(phases, left, rows);
  Product::add(phases, rows, w, left.tokens, StoreSums{out, w.outputs, left.places});
  phases.run(pool, left.tokens * w.inputs * w.outputs / WORK_PER_THREAD + 1);
  return ffi::Error::Success();
}

LeftRows left_rows(const ffi::Buffer<ffi::F32>& x, const ffi::Buffer<ffi::F32>& norm, float eps) {
  const auto shape = x.dimensions();
  const float* scale = norm.element_count() == 0 ? nullptr : norm.typed_data();
  return {x.typed_data(), {scale, eps}, shape[0], shape[1]};
}

ffi::Error project(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm,
                   ffi::Buffer<ffi::S32> wanted, ffi::Buffer<ffi::BF16> w,
                   ffi::ResultBuffer<ffi::F32> out, float eps) {
  const LeftRows left = left_rows(x, norm, eps);
  const Bf16Product::Weights weights{(const uint16_t*)w.untyped_data(), nullptr,
                                     out->dimensions()[1], left.inputs};
  return run<Bf16Product>(pool, left, wanted, weights, out->typed_data());
}

ffi::Error int8_project(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm,
                        ffi::Buffer<ffi::S32> wanted, ffi::Buffer<ffi::S8> w,
                        ffi::Buffer<ffi::F32> scales,
                        ffi::ResultBuffer<ffi::F32> out, float eps) {
  const LeftRows left = left_rows(x, norm, eps);
  const Int8Product::Weights weights{w.typed_data(), scales.typed_data(), out->dimensions()[1],
                                     left.inputs};
  return run<Int8Product>(pool, left, wanted, weights, out->typed_data());
}

}  // namespace
}  // namespace headrace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(headrace_project, headrace::project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
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

#pragma GCC visibility pop
