#include "common/nn/module.h"

namespace lockstep {

std::vector<Parameter*> Module::parameters() {
  std::vector<Parameter*> all;
  for (Parameter& p : parameters_) all.push_back(&p);
  for (const auto& module : children_) {
    for (Parameter* p : module->parameters()) all.push_back(p);
  }
  return all;
}

std::vector<ModelBuffer*> Module::buffers() {
  std::vector<ModelBuffer*> all;
  for (ModelBuffer& b : buffers_) all.push_back(&b);
  for (const auto& module : children_) {
    for (ModelBuffer* b : module->buffers()) all.push_back(b);
  }
  return all;
}

void Module::set_name(const std::string& name) {
  const std::string prefix = name.empty() ? "" : name + ".";
  name_ = name;
  for (Parameter& p : parameters_) p.name = prefix + p.name;
  for (ModelBuffer& b : buffers_) b.name = prefix + b.name;
  for (const auto& module : children_) module->set_name(prefix + module->name_);
}

Parameter& Module::add_parameter(std::string name, ParameterKind kind, Shape shape,
                                 int64_t fan_in) {
  return parameters_.emplace_back(Parameter{
      .name = std::move(name), .kind = kind, .shape = std::move(shape), .fan_in = fan_in});
}

ModelBuffer& Module::add_buffer(std::string name, Shape shape, Real initial) {
  return buffers_.emplace_back(
      ModelBuffer{.name = std::move(name), .shape = std::move(shape), .initial = initial});
}

void Module::gradient_written(Parameter& parameter, const Context& context) {
  parameter.has_new_gradient = true;
  if (context.facts.last_contribution && parameter.on_gradient_ready) {
    parameter.on_gradient_ready(parameter);
  }
}

Layers Sequential::release_layers() {
  std::vector<std::unique_ptr<Module>> layers;
  for (std::unique_ptr<Module>& module : release_children()) {
    auto* inner = dynamic_cast<Sequential*>(module.get());
    if (inner == nullptr) {
      layers.push_back(std::move(module));
      continue;
    }
    for (std::unique_ptr<Module>& layer : inner->release_layers()) {
      layers.push_back(std::move(layer));
    }
  }
  return layers;
}

AnyTensor Sequential::forward(const AnyTensor& x, Context& context) {
  AnyTensor y = x;
  for (const auto& module : children()) {
    const ScopedRange range(context.stream(), module->name());
    y = module->forward(y, context);
  }
  return y;
}

AnyTensor Sequential::backward(const AnyTensor& dy, Context& context) {
  AnyTensor dx = dy;
  for (auto module = children().rbegin(); module != children().rend(); ++module) {
    const ScopedRange range(context.stream(), (*module)->name());
    dx = (*module)->backward(dx, context);
  }
  return dx;
}

void Sequential::skip_input_gradient() {
  for (const auto& module : children()) {
    module->skip_input_gradient();
    if (!module->parameters().empty()) return;  // what comes after it needs no skipping
  }
}

}  // namespace lockstep
