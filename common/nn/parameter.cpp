#include "common/nn/parameter.h"

#include "common/kernels/kernels.h"
#include "common/nn/module.h"

namespace lockstep {

int64_t aligned(int64_t elements) {
  constexpr int64_t kAlignment = 64 / sizeof(Real);
  return (elements + kAlignment - 1) / kAlignment * kAlignment;
}

void GradientMarks::write(Stream stream) const {
  // Mostly all of them: one operation for as many as lie side by side.
  for (size_t first = 0, end; first < parameters_.size(); first = end + 1) {
    for (end = first; end < parameters_.size() && parameters_[end]->has_new_gradient; ++end) {
      parameters_[end]->has_new_gradient = false;
    }
    if (first == end) continue;
    stream.kernels().fill(stream, 1, marks_.range(int64_t(first), {int64_t(end - first)}));
  }
}

void GradientMarks::add(const GradientMarks& copy) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i]->has_new_gradient |= copy.parameters_[i]->has_new_gradient;
  }
}

void GradientMarks::forget() const {
  for (Parameter* p : parameters_) p->has_new_gradient = false;
}

FlatBuffers::FlatBuffers(Module& module, Stream stream) : buffers_(module.buffers()) {
  int64_t total = 0;
  for (const ModelBuffer* buffer : buffers_) total += aligned(buffer->shape.elements());
  values_ = Tensor::empty(stream, {total});
  stream.kernels().fill(stream, 0, values_);
  int64_t at = 0;
  for (ModelBuffer* buffer : buffers_) {
    buffer->value = values_.range(at, buffer->shape);
    stream.kernels().fill(stream, buffer->initial, buffer->value);
    at += aligned(buffer->shape.elements());
  }
}

AnyTensor rounded_copies(Precision precision, Stream stream, int64_t elements) {
  if (precision == Precision::real) return {};
  return AnyTensor::empty(stream, {elements}, type_of(precision));
}

FlatParameters::FlatParameters(Module& module, Stream stream, Precision precision)
    : parameters_(module.parameters()), buffers_(module, stream), precision_(precision) {
  int64_t total = 0;
  for (const Parameter* p : parameters_) total += aligned(p->shape.elements());
  values_ = Tensor::empty(stream, {total});
  const auto count = int64_t(parameters_.size());
  contribution_ = Tensor::empty(stream, {total + 1 + count});
  gradients_ = contribution_.range(0, {total});
  marks_ = GradientMarks({parameters_.rbegin(), parameters_.rend()},
                         contribution_.range(total + 1, {count}));
  stream.kernels().fill(stream, 0, values_);
  stream.kernels().fill(stream, 0, contribution_);
  rounded_ = rounded_copies(precision, stream, total);
  int64_t at = 0;
  for (auto p = parameters_.rbegin(); p != parameters_.rend(); ++p) {
    (*p)->value = values_.range(at, (*p)->shape);
    (*p)->grad = gradients_.range(at, (*p)->shape);
    if (rounded_.defined()) (*p)->rounded = rounded_.range(at, (*p)->shape);
    at += aligned((*p)->shape.elements());
  }
}

void FlatParameters::round() const {
  if (rounded_.defined()) stream().kernels().to_sixteen_bits(stream(), 1, values_, rounded_);
}

BasicTensor<Stretch> FlatParameters::stretches() const {
  std::vector<Stretch> all;
  int64_t end = 0;
  for (const Parameter* p : marks_.parameters()) {
    end += aligned(p->shape.elements());
    all.push_back({.end = end, .parameter = int64_t(all.size())});
  }
  return BasicTensor<Stretch>::from_host(stream(), {int64_t(all.size())}, all);
}

int64_t FlatParameters::count() const {
  int64_t count = 0;
  for (const Parameter* p : parameters_) count += p->shape.elements();
  return count;
}

void FlatParameters::zero_gradients() const {
  stream().kernels().fill(stream(), 0, contribution_);
  marks_.forget();
}

}  // namespace lockstep
