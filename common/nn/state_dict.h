#pragma once
// The border between our memory layout and PyTorch's: what checkpoints and parity files hold.

#include <map>
#include <string>
#include <vector>

#include "common/nn/module.h"

namespace lockstep {

/// PyTorch's shape of a parameter: [O,I,kh,kw] for convolution weights, else the shape in memory.
Shape torch_shape(const Parameter& parameter);
/// Reorders a parameter's values from PyTorch's order to ours, and back. Throws BadInput unless
/// there are as many values as the parameter's shape says.
std::vector<Real> from_torch_layout(const Parameter& parameter, const std::vector<Real>& values);
std::vector<Real> to_torch_layout(const Parameter& parameter, const std::vector<Real>& values);

/// A named tensor of the model on the host, in PyTorch's layout. `integer` holds what PyTorch keeps
/// as int64 (num_batches_tracked), `real` everything else.
struct StateTensor {
  std::string name;
  Shape shape{};
  std::vector<Real> real{};
  std::vector<int64_t> integer{};
  /// The reason why there are no values: "has dtype I32, expected F32". Empty if there are values.
  std::string problem{};
};

/// The whole state of a network, as torch's state_dict() names it: parameters, running statistics,
/// num_batches_tracked. Synchronizes.
std::vector<StateTensor> state_dict(Module& network);
/// Parts of this state: one parameter, and everything that is not a parameter.
StateTensor state_of(const Parameter& parameter);
std::vector<StateTensor> running_state(Module& network);
/// running_state() with zeros as values. The network need not have memory.
std::vector<StateTensor> blank_running_state(Module& network);

/// Sets the state. Throws a BadInput that lists every missing and unexpected tensor, and every
/// tensor with another shape or a problem; the network is then unchanged. num_batches_tracked may
/// be missing.
void load_state_dict(Module& network, const std::vector<StateTensor>& state);
/// Sets all that is not a parameter, by name, from tensors that check_state_dict() found to fit.
void load_running_state(Module& network, const std::map<std::string, StateTensor>& state);
/// Throws as load_state_dict() does and changes nothing. The network need not have memory yet.
void check_state_dict(Module& network, const std::vector<StateTensor>& state);

/// The same three functions for tensors with one number per learnt number, for instance an
/// optimizer's momentum. `flat` is laid out as FlatParameters::values(), a name is `prefix` and the
/// parameter's name.
std::vector<StateTensor> flat_state_dict(const FlatParameters& parameters, const Tensor& flat,
                                         const std::string& prefix);
void load_flat_state_dict(const FlatParameters& parameters, const Tensor& flat,
                          const std::string& prefix, const std::vector<StateTensor>& state);
void check_flat_state_dict(const FlatParameters& parameters, const std::string& prefix,
                           const std::vector<StateTensor>& state);

/// num_batches_tracked of every batch normalisation, in order of registration.
std::vector<int64_t> batches_tracked(Module& network);
/// Throws BadInput for a wrong number of values.
void set_batches_tracked(Module& network, const std::vector<int64_t>& batches);

}  // namespace lockstep
