#include "07-mesh/mesh_parallel.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/core/error.h"
#include "common/training/weights_file.h"

namespace lockstep {

MeshParallel::MeshParallel(Model& model, const ModelOptions& options, DeviceMesh& mesh,
                           Stream passes, Stream communication, const ShardingOptions& sharding)
    : mesh_(mesh),
      passes_(passes),
      communication_(communication),
      unsplit_(std::move(model.network)),
      ranks_(mesh.along({Axis::tensor}), communication),
      sharded_((split(model, options), shard(model, sharding))) {
  for (const Parameter* p : unsplit_->parameters()) {
    of_unsplit_[p->name] = p;
    whole_shapes_[p->name] = torch_shape(*p);
  }
  for (const ModelBuffer* b : unsplit_->buffers()) whole_shapes_[b->name] = b->shape;
}

/// Along `tensor`: all layers that can be split.
void MeshParallel::split(Model& model, const ModelOptions& options) {
  mesh_.group().together([&] {
    auto network = std::make_unique<TensorSplit>(options, ranks_);
    require(ranks_.world_size() == 1 || !network->split_names().empty(),
            "--mesh {}: no layer of this network divides by {} ranks along tensor; give another "
            "number",
            mesh_.shape().text(), ranks_.world_size());
    model.network = std::move(network);
  });
}

AveragingAxes averaging_axes(const MeshShape& shape) {
  // [task 07.2] axes of an average
  // Not along `tensor`: there ranks have the same samples, and other parts of a gradient.
  if (shape.size(Axis::shard) == 1) return {.reduced = Axis::data};
  if (shape.size(Axis::data) == 1) return {.reduced = Axis::shard};
  return {.reduced = Axis::shard, .replicas = Axis::data};
  // [end 07.2]
}

/// Along `shard` and `data`. Without the former every rank keeps all, as in stage 04.
FullyShardedDataParallel& MeshParallel::shard(Model& model, ShardingOptions options) {
  const AveragingAxes axes = averaging_axes(mesh_.shape());
  if (axes.reduced != Axis::shard) options.kind = ShardKind::none;
  Communicator& comm = mesh_.along({axes.reduced});
  Communicator* const replicas = axes.replicas ? &mesh_.along({*axes.replicas}) : nullptr;
  return model.wrap<FullyShardedDataParallel>(passes_, comm, mesh_.group().exchanger(),
                                              communication_, options, replicas);
}

int64_t MeshParallel::count() const {
  int64_t count = 0;
  for (const auto& [name, p] : of_unsplit_) count += p->shape.elements();
  return count;
}

// --- Values --------------------------------------------------------------------------------------

Shape MeshParallel::whole_shape(const std::string& name, const Shape& part) const {
  const auto found = whole_shapes_.find(name);  // num_batches_tracked has no shape of its own
  return found == whole_shapes_.end() ? part : found->second;
}

/// `whole` as of the unsplit network, in PyTorch's layout.
void MeshParallel::set(Parameter& p, const std::vector<Real>& whole) const {
  const Shape part = torch_shape(p);
  p.value.copy_from_host(
      from_torch_layout(p, part_of(whole, whole_shape(p.name, part), part, ranks_.rank())));
}

void MeshParallel::initialize(Initializer initializer, uint64_t seed) {
  sharded_.load_units([&](Unit& unit) {
    for (Parameter* p : unit.in_order()) {
      set(*p, first_values(*of_unsplit_.at(p->name), initializer, seed));
    }
  });
}

void MeshParallel::load_weights(const std::string& path) {
  if (path.empty()) return;
  ProcessGroup& group = mesh_.group();
  std::optional<WeightsFile> file;      // on rank 0
  std::map<std::string, size_t> place;  // of each tensor in it
  group.together([&] {
    if (group.rank() != 0) return;
    file.emplace(path);
    within(path, [&] { check_state_dict(*unsplit_, file->tensors()); });
    for (size_t i = 0; i < file->tensors().size(); ++i) place[file->tensors()[i].name] = i;
  });
  const auto read = [&](StateTensor& tensor) {  // becomes the file's, on all ranks
    tensor.real.resize(tensor.integer.empty() ? size_t(tensor.shape.elements()) : 0);
    group.together([&] {
      if (place.contains(tensor.name)) tensor = file->read(place.at(tensor.name));
    });
    broadcast(tensor.real, passes_, mesh_.world());
    broadcast(tensor.integer, passes_, mesh_.world());
  };
  sharded_.load_units([&](Unit& unit) {
    for (Parameter* p : unit.in_order()) {
      StateTensor whole{.name = p->name, .shape = whole_shapes_.at(p->name)};
      read(whole);
      set(*p, whole.real);
    }
  });
  std::map<std::string, StateTensor> running;
  for (StateTensor& tensor : running_state(sharded_)) {
    tensor.shape = whole_shape(tensor.name, tensor.shape);
    read(tensor);
    running.emplace(tensor.name, tensor);
  }
  load_running(running);
  if (file) file->say_loaded();
}

/// All ranks along `tensor` call it.
StateTensor MeshParallel::whole_of(StateTensor part) const {
  const Shape shape = whole_shape(part.name, part.shape);
  if (shape == part.shape) return part;
  part.real = joined(gathered(part.real, passes_, ranks_.comm()), shape, part.shape);
  part.shape = shape;
  return part;
}

std::vector<Real> MeshParallel::whole_numbers(const Parameter& p,
                                              const std::vector<Real>& part) const {
  const Shape& whole = of_unsplit(p).shape;
  if (whole == p.shape) return part;
  return joined(gathered(part, passes_, ranks_.comm()), whole, p.shape);
}

std::vector<StateTensor> MeshParallel::running() const {
  std::vector<StateTensor> whole;
  for (const StateTensor& part : running_state(sharded_)) whole.push_back(whole_of(part));
  return whole;
}

void MeshParallel::load_running(std::map<std::string, StateTensor> whole) const {
  for (const StateTensor& mine : running_state(sharded_)) {
    StateTensor& tensor = whole.at(mine.name);
    tensor.real = part_of(tensor.real, tensor.shape, mine.shape, ranks_.rank());
    tensor.shape = mine.shape;
  }
  load_running_state(sharded_, whole);
}

void MeshParallel::save_weights(const std::string& path) {
  if (path.empty()) return;
  const bool writes = mesh_.group().rank() == 0;
  std::vector<StateTensor> state;
  sharded_.visit_units([&](Unit& unit) {
    for (const Parameter* p : unit.parameters()) {
      StateTensor whole = whole_of(state_of(*p));
      if (writes) state.push_back(std::move(whole));
    }
  });
  for (StateTensor& tensor : running()) {
    if (writes) state.push_back(std::move(tensor));
  }
  mesh_.group().together([&] {
    if (writes) lockstep::save_weights(path, state);
  });
}

// --- The norm ------------------------------------------------------------------------------------

// [task 07.3] the norm over a mesh
Axes cut_along(ShardKind kind) {
  Axes cut{Axis::tensor};
  if (kind != ShardKind::none) cut.insert(Axis::shard);  // even where all have all gradients
  return cut;
}

bool counts_in_norm(const Shape& here, const Shape& whole, int tensor_place) {
  return here != whole || tensor_place == 0;  // of what all ranks have, the first one's counts
}
// [end 07.3]

/// Of this rank's shards: pieces, as few as there can be.
std::vector<Tensor> MeshParallel::counted_gradients() const {
  std::vector<Tensor> counted;
  for (const Unit* unit : sharded_.units()) {
    std::optional<FlatRange> run;  // of pieces that follow each other
    const auto end_run = [&] {
      if (run) counted.push_back(unit->gradient_shard().range(run->first, {run->count}));
      run.reset();
    };
    for (const Piece& piece : pieces_in(unit->ranges(), unit->shard())) {
      const Parameter& p = *unit->in_order()[piece.parameter];
      if (!counts_in_norm(torch_shape(p), whole_shapes_.at(p.name), ranks_.rank())) {
        end_run();
        continue;
      }
      if (!run) run = FlatRange{piece.in_shard, 0};
      run->count = piece.in_shard + piece.of_parameter.count - run->first;
    }
    end_run();
  }
  return counted;
}

ClipByNorm MeshParallel::clip_by_norm(double most) const {
  const Axes cut = cut_along(sharded_.options().kind);
  return ClipByNorm(passes_, sharded_.shards(), counted_gradients(), most,
                    [this, cut](const Tensor& squares) {
                      communication_.wait(passes_.record());
                      mesh_.along(cut).all_reduce(communication_, squares);
                      passes_.wait(communication_.record());
                    });
}

}  // namespace lockstep
