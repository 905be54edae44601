#pragma once
// Parameters, and the flat buffers that hold them.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/kernels/kernels.h"

namespace lockstep {

class Module;

/// The kind of a model's tensor: decides its first values and its shape in a checkpoint.
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
  /// `value` in 16 bits. Convolutions and products read this copy if it is defined (Optimizer).
  AnyTensor rounded{};
  AnyTensor in_products() const { return rounded.defined() ? rounded : AnyTensor(value); }
  /// Called on the host, in backward order, once per optimizer step, when the last kernel that
  /// writes `grad` has been enqueued.
  std::function<void(Parameter&)> on_gradient_ready{};
  bool has_new_gradient = false;  // GradientMarks
};

/// A tensor that is part of the state but not learnt: BatchNorm's running statistics.
struct ModelBuffer {
  std::string name;
  Shape shape;
  Real initial;
  Tensor value{};
};

/// Memory for the copies of `elements` values that products read: undefined, unless the precision
/// has 16 bits.
AnyTensor rounded_copies(Precision precision, Stream stream, int64_t elements);

/// `elements` rounded up to a multiple of 64 bytes (vector loads, cuDNN): in a flat buffer each
/// tensor begins at such a multiple.
int64_t aligned(int64_t elements);

/// Which parameters have a gradient in this step. Parameters of a layer that no pass has used have
/// none (PyTorch's grad is None), and an optimizer leaves these parameters as they are. The marks
/// are in device memory, where the marks of several ranks can be added up.
class GradientMarks {
 public:
  GradientMarks() = default;  // of no parameters
  /// `marks` [parameters]: above 0 for each that has a gradient.
  GradientMarks(std::vector<Parameter*> parameters, Tensor marks)
      : parameters_(std::move(parameters)), marks_(std::move(marks)) {}

  /// Marks the parameters that passes have given a gradient since the last call.
  void write(Stream stream) const;
  /// If passes have given a parameter a gradient in a copy of the network, it has a gradient here,
  /// too.
  void add(const GradientMarks& copy) const;
  /// Call it when a step begins, after the marks have been zeroed.
  void forget() const;
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  const Tensor& marks() const { return marks_; }

 private:
  std::vector<Parameter*> parameters_;
  Tensor marks_;
};

/// Puts the running statistics of a module into one flat buffer, in order of registration, and
/// points every ModelBuffer into it, with its initial values.
class FlatBuffers {
 public:
  FlatBuffers(Module& module, Stream stream);

  const Tensor& values() const { return values_; }  // [elements, gaps included]
  const std::vector<ModelBuffer*>& buffers() const { return buffers_; }  // registration order

 private:
  std::vector<ModelBuffer*> buffers_;
  Tensor values_;
};

/// Puts all parameters of a module into one flat buffer and all gradients into another, each in
/// REVERSE order of registration. Backward finishes gradients roughly in that order, so that a
/// bucket of finished gradients is a range of one buffer. Every parameter is aligned(); the gaps
/// hold zeros.
class FlatParameters {
 public:
  /// Allocates on the stream's device and points every Parameter and ModelBuffer into it; values
  /// are undefined until initialize() or a load, gradients are zero. With a precision of 16 bits
  /// there is a third buffer, of rounded values.
  FlatParameters(Module& module, Stream stream, Precision precision = Precision::real);

  Stream stream() const { return values_.home(); }
  const Tensor& values() const { return values_; }        // [elements, gaps included]
  const Tensor& gradients() const { return gradients_; }  // the same layout
  /// The memory of the gradients and, after them, the loss and the marks: all that is zeroed,
  /// summed and sent together.
  const Tensor& contribution() const { return contribution_; }
  /// The loss, [1].
  Tensor loss() const { return contribution_.range(gradients_.elements(), {1}); }
  const GradientMarks& marks() const { return marks_; }  // in the order of the buffers
  /// The stretches of both buffers.
  BasicTensor<Stretch> stretches() const;
  const Tensor& buffer_values() const { return buffers_.values(); }  // running statistics, likewise
  const std::vector<Parameter*>& parameters() const { return parameters_; }  // registration order
  const std::vector<ModelBuffer*>& buffers() const { return buffers_.buffers(); }
  /// The number of learnt values, gaps not counted: 21,840 for the seed network.
  int64_t count() const;
  /// Sets the gradients, the loss and the marks to zero.
  void zero_gradients() const;
  /// The values in 16 bits, [elements], which an optimizer makes; undefined where layers compute
  /// with the values themselves.
  const AnyTensor& rounded() const { return rounded_; }
  /// Makes rounded() from values that no optimizer has written.
  void round() const;
  Precision precision() const { return precision_; }

 private:
  std::vector<Parameter*> parameters_;
  FlatBuffers buffers_;
  Tensor values_, contribution_, gradients_;
  Precision precision_;
  AnyTensor rounded_;
  GradientMarks marks_;
};

}  // namespace lockstep
