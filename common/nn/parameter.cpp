#include "common/nn/parameter.h"

#include "common/kernels/kernels.h"
#include "common/nn/module.h"

namespace lockstep {

int64_t elements_in_flat_buffer(const Shape& shape) {
  constexpr int64_t kAlignment = 64 / sizeof(Real);
  return (shape.elements() + kAlignment - 1) / kAlignment * kAlignment;
}

FlatParameters::FlatParameters(Module& module, Stream stream)
    : parameters_(module.parameters()), buffers_(module.buffers()) {
  int64_t total = 0;
  for (const Parameter* p : parameters_) total += elements_in_flat_buffer(p->shape);
  values_ = Tensor::empty(stream, {total});
  gradients_and_loss_ = Tensor::empty(stream, {total + 1});
  gradients_ = gradients_and_loss_.range(0, {total});
  stream.kernels().fill(stream, 0, values_);
  stream.kernels().fill(stream, 0, gradients_and_loss_);
  int64_t at = 0;
  for (auto p = parameters_.rbegin(); p != parameters_.rend(); ++p) {
    (*p)->value = values_.range(at, (*p)->shape);
    (*p)->grad = gradients_.range(at, (*p)->shape);
    at += elements_in_flat_buffer((*p)->shape);
  }
  int64_t total_buffers = 0;
  for (const ModelBuffer* buffer : buffers_)
    total_buffers += elements_in_flat_buffer(buffer->shape);
  buffer_values_ = Tensor::empty(stream, {total_buffers});
  stream.kernels().fill(stream, 0, buffer_values_);
  at = 0;
  for (ModelBuffer* buffer : buffers_) {
    buffer->value = buffer_values_.range(at, buffer->shape);
    stream.kernels().fill(stream, buffer->initial, buffer->value);
    at += elements_in_flat_buffer(buffer->shape);
  }
}

int64_t FlatParameters::count() const {
  int64_t count = 0;
  for (const Parameter* p : parameters_) count += p->shape.elements();
  return count;
}

void FlatParameters::zero_gradients() const {
  stream().kernels().fill(stream(), 0, gradients_and_loss_);
}

}  // namespace lockstep
