#pragma once
// Modules: explicit forward and backward, no tape.

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/nn/context.h"
#include "common/nn/parameter.h"

namespace lockstep {

/// A layer or a network of layers. Work is enqueued on the context's stream, on whose device the
/// module's parameters must be. Mirrors torch.nn.Module, with backward written out.
class Module {
 public:
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// The output for input x. Saves in the context what backward will need. Throws BadInput, naming
  /// this module, if x has the wrong shape.
  virtual AnyTensor forward(const AnyTensor& x, Context& context) = 0;
  /// Given dy, the gradient of the output: ADDS the parameters' gradients to Parameter::grad and
  /// returns the gradient of the input (undefined where skip_input_gradient() was called). Once per
  /// forward.
  virtual AnyTensor backward(const AnyTensor& dy, Context& context) = 0;

  /// All parameters of this module and those inside it, in order of registration.
  std::vector<Parameter*> parameters();
  /// The running statistics, likewise.
  std::vector<ModelBuffer*> buffers();
  /// The modules directly inside this one, in order.
  const std::vector<std::unique_ptr<Module>>& children() const { return children_; }

  /// "block1.0.conv1"; empty for the outermost module. Names are used for parameters, traces,
  /// errors, and the random numbers of dropout and initialisers.
  const std::string& name() const { return name_; }
  /// Names this module and, below it, everything inside. Call it once, on the outermost module.
  void set_name(const std::string& name);
  /// The first layer of a network needs no gradient of its input, the images.
  virtual void skip_input_gradient() {}

 protected:
  Module() = default;

  Parameter& add_parameter(std::string name, ParameterKind kind, Shape shape, int64_t fan_in);
  ModelBuffer& add_buffer(std::string name, Shape shape, Real initial);
  template <class M>
  // NOLINTNEXTLINE(performance-unnecessary-value-param): it is moved, into a type not known yet.
  M& add_module(std::string name, std::unique_ptr<M> module) {
    M& added = *module;
    added.name_ = std::move(name);
    children_.push_back(std::move(module));
    return added;
  }

  /// Gives away the modules inside, in order.
  std::vector<std::unique_ptr<Module>> release_children() { return std::exchange(children_, {}); }

  /// Call it when the last kernel that writes `parameter.grad` in this pass is enqueued.
  static void gradient_written(Parameter& parameter, const Context& context);

 private:
  std::string name_;
  std::deque<Parameter> parameters_;  // deque: addresses stay
  std::deque<ModelBuffer> buffers_;
  std::vector<std::unique_ptr<Module>> children_;
};

using Layers = std::vector<std::unique_ptr<Module>>;

/// Modules one after another. Mirrors torch.nn.Sequential with named children.
class Sequential : public Module {
 public:
  /// Appends; returns *this, so that a network can be written as one chain.
  Sequential& add(std::string name, std::unique_ptr<Module> module) {
    add_module(std::move(name), std::move(module));
    return *this;
  }
  /// Gives its modules away, in order; a Sequential among them gives its own. They keep their names
  /// ("block1.0"), so that they can be combined anew.
  Layers release_layers();
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  AnyTensor backward(const AnyTensor& dy, Context& context) override;
  void skip_input_gradient() override;
};

}  // namespace lockstep
