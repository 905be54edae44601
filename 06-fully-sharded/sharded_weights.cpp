#include "06-fully-sharded/sharded_weights.h"

#include <map>
#include <optional>
#include <vector>

#include "common/core/error.h"
#include "common/nn/state_dict.h"
#include "common/training/weights_file.h"

namespace lockstep {

namespace {

/// On rank 0: an open file, and where in it each tensor is.
struct OpenWeights {
  OpenWeights(const std::string& path, FullyShardedDataParallel& network) : file(path) {
    within(path, [&] { check_state_dict(network, file.tensors()); });
    for (size_t i = 0; i < file.tensors().size(); ++i) place[file.tensors()[i].name] = i;
  }
  StateTensor read(const std::string& name) const { return file.read(place.at(name)); }

  WeightsFile file;
  std::map<std::string, size_t> place;
};

/// Running statistics and counters, which are no parameters.
void load_running(const OpenWeights& weights, FullyShardedDataParallel& network) {
  std::map<std::string, StateTensor> running;
  for (const auto& [name, place] : weights.place) running.emplace(name, StateTensor{.name = name});
  for (const Parameter* p : network.parameters()) running.erase(p->name);
  for (auto& [name, tensor] : running) tensor = weights.read(name);
  load_running_state(network, running);
}

}  // namespace

void load_weights(ProcessGroup& group, Communicator& comm, const std::string& path,
                  FullyShardedDataParallel& network) {
  if (path.empty()) return;
  std::optional<OpenWeights> weights;  // on rank 0
  group.together([&] {
    if (group.rank() == 0) weights.emplace(path, network);
  });
  network.load_units([&](Unit& unit) {
    group.together([&] {
      if (!weights) return;
      for (Parameter* p : unit.in_order()) {
        p->value.copy_from_host(from_torch_layout(*p, weights->read(p->name).real));
      }
    });
    comm.broadcast(unit.values().home(), unit.values(), 0);
  });
  group.together([&] {
    if (!weights) return;
    load_running(*weights, network);
    weights->file.say_loaded();
  });
  const Tensor& statistics = network.running_statistics().values();
  if (statistics.elements() > 0) comm.broadcast(statistics.home(), statistics, 0);
}

void save_weights(ProcessGroup& group, const std::string& path, FullyShardedDataParallel& network) {
  if (path.empty()) return;
  const bool writes = group.rank() == 0;
  std::vector<StateTensor> state;
  network.visit_units([&](Unit& unit) {
    for (const Parameter* p : unit.parameters()) {
      if (writes) state.push_back(state_of(*p));
    }
  });
  group.together([&] {
    if (!writes) return;
    for (StateTensor& tensor : running_state(network)) state.push_back(std::move(tensor));
    save_weights(path, state);
  });
}

}  // namespace lockstep
