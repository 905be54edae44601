#pragma once
// Parameters, and the flat buffers that hold them.

#include <functional>
#include <string>
#include <vector>

#include "common/core/tensor.h"

namespace lockstep {

class Module;

/// What a tensor of the model is, which decides its first values and its shape in a checkpoint.
enum class ParameterKind {
  conv_weight,    // [O,kh,kw,I] in memory, PyTorch's [O,I,kh,kw] in checkpoints
  linear_weight,  // [O,I]
  bias,           // [O]
  norm_weight,    // [C], BatchNorm's scale
  norm_bias,      // [C]
};

/// A learnt tensor and its gradient. `value` and `grad` are views into the flat buffers of
/// FlatParameters and undefined before those are made.
struct Parameter {
  std::string name;  // PyTorch's: "block1.0.conv1.weight"
  ParameterKind kind;
  Shape shape;     // in memory
  int64_t fan_in;  // inputs of one output, for the initialisers
  Tensor value{};
  Tensor grad{};
  /// Called on the host, in backward order, once per optimizer step, when the last kernel that
  /// writes `grad` has been enqueued.
  std::function<void(Parameter&)> on_gradient_ready{};
};

/// A tensor that is part of the state but not learnt: BatchNorm's running statistics.
struct ModelBuffer {
  std::string name;
  Shape shape;
  Real initial;
  Tensor value{};
};

/// How many elements a tensor of this shape takes in a flat buffer: with the gap after it.
int64_t elements_in_flat_buffer(const Shape& shape);

/// Puts all parameters of a module into one flat buffer and all gradients into another, each in
/// REVERSE order of registration. Backward finishes gradients roughly in that
/// order, so that a bucket of finished gradients is a range of one buffer. Every parameter starts
/// at a multiple of 64 bytes (vector loads, cuDNN); the gaps hold zeros.
class FlatParameters {
 public:
  /// Allocates on the stream's device and points every Parameter and ModelBuffer into it; values
  /// are undefined until initialize() or a load, gradients are zero.
  FlatParameters(Module& module, Stream stream);

  Stream stream() const { return values_.home(); }
  const Tensor& values() const { return values_; }        // [elements, gaps included]
  const Tensor& gradients() const { return gradients_; }  // the same layout
  /// The same memory and, after the gradients, one more number: the loss, which is summed and sent
  /// together with them.
  const Tensor& gradients_and_loss() const { return gradients_and_loss_; }
  /// [1]
  Tensor loss() const { return gradients_and_loss_.range(gradients_.elements(), {1}); }
  const Tensor& buffer_values() const { return buffer_values_; }  // running statistics, likewise
  const std::vector<Parameter*>& parameters() const { return parameters_; }  // registration order
  const std::vector<ModelBuffer*>& buffers() const { return buffers_; }
  /// The number of learnt values, gaps not counted: 21,840 for the seed network.
  int64_t count() const;
  /// Sets the gradients, and the loss after them, to zero.
  void zero_gradients() const;

 private:
  std::vector<Parameter*> parameters_;
  std::vector<ModelBuffer*> buffers_;
  Tensor values_, gradients_and_loss_, gradients_, buffer_values_;
};

}  // namespace lockstep
