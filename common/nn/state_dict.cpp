#include "common/nn/state_dict.h"

#include <map>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/nn/batch_norm.h"

namespace lockstep {
namespace {

/// [outer][a][b] to [outer][b][a].
std::vector<Real> swap_inner(const std::vector<Real>& values, int64_t outer, int64_t a, int64_t b) {
  std::vector<Real> swapped(values.size());
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < a * b; ++i) {
      swapped[o * a * b + i % b * a + i / b] = values[o * a * b + i];
    }
  }
  return swapped;
}

std::string tracked_name(const BatchNorm2d& norm) {
  return norm.name() + (norm.name().empty() ? "" : ".") + "num_batches_tracked";
}

/// Finds what load_state_dict will need and collects what is wrong.
class Matcher {
 public:
  explicit Matcher(const std::vector<StateTensor>& state) {
    for (const StateTensor& tensor : state) unused_[tensor.name] = &tensor;
  }

  const StateTensor* find(const std::string& name, const Shape& shape, bool required) {
    const auto found = unused_.find(name);
    if (found == unused_.end()) {
      if (required) problems_.push_back("missing " + name);
      return nullptr;
    }
    const StateTensor* tensor = found->second;
    unused_.erase(found);
    if (!tensor->problem.empty()) {
      problems_.push_back(name + " " + tensor->problem);
      ++of_other_types_;
    } else if (tensor->shape != shape) {
      problems_.push_back(
          fmt::format("{} has shape {}, expected {}", name, tensor->shape.text(), shape.text()));
    } else {
      return tensor;
    }
    return nullptr;
  }

  void throw_problems() {
    for (const auto& [name, tensor] : unused_) problems_.push_back("unexpected " + name);
    if (problems_.empty()) return;
    fail<BadInput>("the tensors do not fit this network: {}; {}", listed(problems_),
                   problems_.size() == of_other_types_
                       ? "convert them in the program that saved them"
                       : "use the --model and --width that the file was saved with");
  }

 private:
  std::map<std::string, const StateTensor*> unused_;
  std::vector<std::string> problems_;
  size_t of_other_types_ = 0;  // of the problems
};

/// Which tensor of `state` goes where in the network. Throws BadInput unless all of them fit.
struct Matches {
  Matches(Module& network, const std::vector<StateTensor>& state) {
    Matcher matcher(state);
    for (const Parameter* p : network.parameters()) {
      parameters.emplace_back(p, matcher.find(p->name, torch_shape(*p), true));
    }
    for (const ModelBuffer* b : network.buffers()) {
      buffers.emplace_back(b, matcher.find(b->name, b->shape, true));
    }
    for (BatchNorm2d* norm : batch_norms(network)) {
      tracked.emplace_back(norm, matcher.find(tracked_name(*norm), {}, false));
    }
    matcher.throw_problems();
  }

  std::vector<std::pair<const Parameter*, const StateTensor*>> parameters;
  std::vector<std::pair<const ModelBuffer*, const StateTensor*>> buffers;
  std::vector<std::pair<BatchNorm2d*, const StateTensor*>> tracked;  // null: not in the state
};

using FlatMatches = std::vector<std::pair<const Parameter*, const StateTensor*>>;

/// The same for numbers that belong to parameters.
FlatMatches match_flat(const FlatParameters& parameters, const std::string& prefix,
                       const std::vector<StateTensor>& state) {
  FlatMatches matches;
  Matcher matcher(state);
  for (const Parameter* p : parameters.parameters()) {
    matches.emplace_back(p, matcher.find(prefix + p->name, torch_shape(*p), true));
  }
  matcher.throw_problems();
  return matches;
}

/// The part of `flat` that belongs to a parameter.
Tensor part_of(const Tensor& flat, const Parameter& p, const FlatParameters& parameters) {
  return flat.range(p.value.data() - parameters.values().data(), p.shape);
}

}  // namespace

Shape torch_shape(const Parameter& p) {
  if (p.kind != ParameterKind::conv_weight) return p.shape;
  return {p.shape[0], p.shape[3], p.shape[1], p.shape[2]};
}

std::vector<Real> from_torch_layout(const Parameter& p, const std::vector<Real>& values) {
  require_values(int64_t(values.size()), p.shape);
  if (p.kind != ParameterKind::conv_weight) return values;
  return swap_inner(values, p.shape[0], p.shape[3], p.shape[1] * p.shape[2]);
}

std::vector<Real> to_torch_layout(const Parameter& p, const std::vector<Real>& values) {
  require_values(int64_t(values.size()), p.shape);
  if (p.kind != ParameterKind::conv_weight) return values;
  return swap_inner(values, p.shape[0], p.shape[1] * p.shape[2], p.shape[3]);
}

StateTensor state_of(const Parameter& p) {
  return {p.name, torch_shape(p), to_torch_layout(p, p.value.to_host()), {}};
}

std::vector<StateTensor> state_dict(Module& network) {
  std::vector<StateTensor> state;
  for (const Parameter* p : network.parameters()) state.push_back(state_of(*p));
  for (StateTensor& tensor : running_state(network)) state.push_back(std::move(tensor));
  return state;
}

std::vector<StateTensor> running_state(Module& network) {
  std::vector<StateTensor> state;
  for (const ModelBuffer* b : network.buffers()) {
    state.push_back({b->name, b->shape, b->value.to_host(), {}});
  }
  for (const BatchNorm2d* norm : batch_norms(network)) {
    state.push_back({tracked_name(*norm), {}, {}, {norm->batches_tracked()}});
  }
  return state;
}

std::vector<StateTensor> blank_running_state(Module& network) {
  std::vector<StateTensor> state;
  for (const ModelBuffer* b : network.buffers()) {
    state.push_back({b->name, b->shape, std::vector<Real>(size_t(b->shape.elements())), {}});
  }
  for (const BatchNorm2d* norm : batch_norms(network)) {
    state.push_back({tracked_name(*norm), {}, {}, {0}});
  }
  return state;
}

void load_state_dict(Module& network, const std::vector<StateTensor>& state) {
  const Matches matches(network, state);
  for (const auto& [p, tensor] : matches.parameters) {
    p->value.copy_from_host(from_torch_layout(*p, tensor->real));
  }
  for (const auto& [b, tensor] : matches.buffers) b->value.copy_from_host(tensor->real);
  for (const auto& [norm, tensor] : matches.tracked) {
    if (tensor != nullptr) norm->set_batches_tracked(tensor->integer.at(0));
  }
}

void load_running_state(Module& network, const std::map<std::string, StateTensor>& state) {
  for (const ModelBuffer* b : network.buffers()) b->value.copy_from_host(state.at(b->name).real);
  for (BatchNorm2d* norm : batch_norms(network)) {
    const auto found = state.find(tracked_name(*norm));
    if (found != state.end()) norm->set_batches_tracked(found->second.integer.at(0));
  }
}

void check_state_dict(Module& network, const std::vector<StateTensor>& state) {
  const Matches matches(network, state);
}

std::vector<StateTensor> flat_state_dict(const FlatParameters& parameters, const Tensor& flat,
                                         const std::string& prefix) {
  std::vector<StateTensor> state;
  for (const Parameter* p : parameters.parameters()) {
    const std::vector<Real> values = part_of(flat, *p, parameters).to_host();
    state.push_back({prefix + p->name, torch_shape(*p), to_torch_layout(*p, values), {}});
  }
  return state;
}

void load_flat_state_dict(const FlatParameters& parameters, const Tensor& flat,
                          const std::string& prefix, const std::vector<StateTensor>& state) {
  for (const auto& [p, tensor] : match_flat(parameters, prefix, state)) {
    part_of(flat, *p, parameters).copy_from_host(from_torch_layout(*p, tensor->real));
  }
}

void check_flat_state_dict(const FlatParameters& parameters, const std::string& prefix,
                           const std::vector<StateTensor>& state) {
  match_flat(parameters, prefix, state);
}

std::vector<int64_t> batches_tracked(Module& network) {
  std::vector<int64_t> batches;
  for (const BatchNorm2d* norm : batch_norms(network)) batches.push_back(norm->batches_tracked());
  return batches;
}

void set_batches_tracked(Module& network, const std::vector<int64_t>& batches) {
  const std::vector<BatchNorm2d*> norms = batch_norms(network);
  require_equal(batches.size(), norms.size(), "num_batches_tracked: batch normalisations");
  for (size_t i = 0; i < norms.size(); ++i) norms[i]->set_batches_tracked(batches[i]);
}

}  // namespace lockstep
