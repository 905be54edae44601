#include "06-fully-sharded/sharded_weights.h"

#include <map>
#include <vector>

#include "common/nn/state.h"
#include "common/step/weights_file.h"

namespace lockstep {

void load_weights(ProcessGroup& group, Communicator& comm, const std::string& path,
                  FullyShardedDataParallel& network) {
  if (path.empty()) return;
  const bool reads = group.rank() == 0;
  std::map<std::string, StateTensor> read;
  group.together([&] {
    if (!reads) return;
    load_weights(path, [&](const std::vector<StateTensor>& state) {
      check_state_dict(network, state);
      for (const StateTensor& tensor : state) read.emplace(tensor.name, tensor);
    });
  });
  network.load_units([&](Unit& unit) {
    for (Parameter* p : unit.in_order()) {
      if (reads) p->value.copy_from_host(from_torch_layout(*p, read.at(p->name).real));
    }
    comm.broadcast(unit.values().home(), unit.values(), 0);
  });
  if (reads) load_running_state(network, read);
  const Tensor& statistics = network.running_statistics().values();
  if (statistics.elements() > 0) comm.broadcast(statistics.home(), statistics, 0);
}

void save_weights(ProcessGroup& group, const std::string& path,
                  FullyShardedDataParallel& network) {
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
