#include "07-mesh/mesh_parallel.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/core/error.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

/// Messages in the two directions of a pipeline must not wait for each other. From GPUs all but
/// NCCL's are bodies on the host, and CUDA may run a body only when another has ended
/// (StreamBackend::host_task()).
void require_links(const DeviceMesh& mesh) {
  const bool by_host =
      mesh.device().id().kind == DeviceId::Kind::cuda && mesh.group().backend() != "nccl";
  require(
      !by_host,
      "--mesh {}: stages on GPUs send and receive by NCCL, which serves each GPU once; found {} "
      "between ranks on {} and others; name a GPU for each rank and leave --backend out, or "
      "give --devices cpu:0,cpu:1",
      mesh.shape().text(), mesh.group().backend_and_why(), mesh.device().name());
}

/// For fp16, around this rank's part of a network: if a gradient of another part has overflowed,
/// this rank skips the step, too. FullyShardedDataParallel tells it along `data` and `shard`.
class SkipTogether final : public Module {
 public:
  /// After a step's last backward `overflow` [1] is the sum over the ranks of `along`, which have
  /// the other parts.
  SkipTogether(std::unique_ptr<Module> network, Tensor overflow, Communicator& along,
               Stream communication)
      : network_(add_module("", std::move(network))),
        overflow_(std::move(overflow)),
        along_(along),
        communication_(communication) {}

  AnyTensor forward(const AnyTensor& x, Context& context) override {
    return network_.forward(x, context);
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    AnyTensor dx = network_.backward(dy, context);
    if (!context.facts.last_contribution) return dx;
    communication_.wait(context.stream().record());
    along_.all_reduce(communication_, overflow_);
    context.stream().wait(communication_.record());
    return dx;
  }

 private:
  Module& network_;
  Tensor overflow_;
  Communicator& along_;
  Stream communication_;
};

}  // namespace

MeshParallel::MeshParallel(Model& model, const ModelOptions& options, DeviceMesh& mesh,
                           Stream passes, Stream communication, const ShardingOptions& sharding,
                           const PipelinePlan& plan)
    : mesh_(mesh),
      passes_(passes),
      communication_(communication),
      unsplit_(std::move(model.network)),
      ranks_(mesh.along({Axis::tensor}), communication),
      sharded_((split(model, options), cut(model, options), shard(model, sharding))) {
  if (mesh.size(Axis::pipeline) > 1) {
    stage_ =
        &make_stage(model, mesh, passes, communication, plan, options.classes, sharded_.loss());
  }
  if (sharded_.overflow().defined()) {
    Communicator& parts = mesh.along({Axis::tensor, Axis::pipeline});
    if (parts.world_size() > 1) {
      model.wrap<SkipTogether>(sharded_.overflow(), parts, communication);
    }
  }
}

/// Along `tensor`: all layers that can be split, and divide by its ranks. The others are copies.
void MeshParallel::split(Model& model, const ModelOptions& options) {
  for (const Parameter* p : unsplit_->parameters()) {
    of_unsplit_[p->name] = p;
    whole_shapes_[p->name] = torch_shape(*p);
  }
  for (const ModelBuffer* b : unsplit_->buffers()) whole_shapes_[b->name] = b->shape;
  mesh_.group().together([&] {
    within(fmt::format("--mesh {}: along tensor", mesh_.shape().text()),
           [&] { model.network = std::make_unique<TensorSplit>(options, ranks_); });
  });
  const auto is_whole = [&](const Parameter* p) {
    return torch_shape(*p) == whole_shapes_.at(p->name);
  };
  for (const auto& layer : model.network->children()) {
    const std::vector<Parameter*> parameters = layer->parameters();
    if (parameters.empty()) continue;
    const bool copied = std::ranges::all_of(parameters, is_whole);
    (copied ? layers_.copied : layers_.split).push_back(layer->name());
  }
}

AveragingAxes averaging_axes(const MeshShape& shape) {
  // [task 07.2] axes of an average
  // Not along `tensor`: there ranks have the same samples, and other parts of a gradient.
  if (shape.size(Axis::shard) == 1) return {.reduced = Axis::data};
  if (shape.size(Axis::data) == 1) return {.reduced = Axis::shard};
  return {.reduced = Axis::shard, .replicas = Axis::data};
  // [end 07.2]
}

/// Along `pipeline`: a rank keeps the layers of its stage. All ranks cut at the same places.
void MeshParallel::cut(Model& model, const ModelOptions& options) {
  names_.resize(size_t(mesh_.size(Axis::pipeline)));
  if (names_.size() == 1) return;
  std::vector<Layers> stages;
  mesh_.group().together([&] {
    require_links(mesh_);
    within("--mesh " + mesh_.shape().text(), [&] {
      Layers layers = dynamic_cast<Sequential&>(*model.network).release_layers();
      stages =
          cut_into_stages(std::move(layers), flops_of_layers(options, passes_), int(names_.size()));
    });
  });
  for (size_t s = 0; s < stages.size(); ++s) {
    for (const auto& layer : stages[s]) {
      for (const Parameter* p : layer->parameters()) names_[s].push_back(p->name);
    }
  }
  auto mine = std::make_unique<Sequential>();
  for (auto& layer : stages[size_t(mesh_.coordinate(Axis::pipeline))]) {
    const std::string name = layer->name();
    mine->add(name, std::move(layer));
  }
  model.network = std::move(mine);
}

/// Along `shard` and `data`. Without the former every rank keeps all, as in stage 04.
FullyShardedDataParallel& MeshParallel::shard(Model& model, ShardingOptions options) {
  const AveragingAxes axes = averaging_axes(mesh_.shape());
  if (axes.reduced != Axis::shard) options.kind = ShardKind::none;
  Communicator& comm = mesh_.along({axes.reduced});
  Communicator* const replicas = axes.replicas ? &mesh_.along({*axes.replicas}) : nullptr;
  return model.wrap<FullyShardedDataParallel>(passes_, comm, exchange_in_stage(), communication_,
                                              options, replicas);
}

/// Ranks of other stages have other layers: their texts count as this rank's.
ExchangeTexts MeshParallel::exchange_in_stage() const {
  return [this](const std::string& mine) {
    std::vector<std::string> texts = mesh_.group().exchange(mine);
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (mesh_.shape().coordinate(int(rank), Axis::pipeline) != mesh_.coordinate(Axis::pipeline)) {
        texts[rank] = mine;
      }
    }
    return texts;
  };
}

int64_t MeshParallel::count() const {
  int64_t count = 0;
  for (const auto& [name, p] : of_unsplit_) count += p->shape.elements();
  return count;
}

double MeshParallel::seconds_waited(Axis axis) {
  if (axis == Axis::tensor) return ranks_.seconds_waited();
  if (axis == Axis::pipeline) return stage_ == nullptr ? 0 : stage_->seconds_waited();
  const AveragingAxes axes = averaging_axes(mesh_.shape());
  if (axis == axes.reduced) return sharded_.seconds_waited();
  return axis == axes.replicas ? sharded_.seconds_waited_for_replicas() : 0;
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

void load_weights(ProcessGroup& group, Communicator& comm, const std::string& path,
                  MeshParallel& network) {
  if (path.empty()) return;
  std::optional<WeightsFile> file;      // on rank 0
  std::map<std::string, size_t> place;  // of each tensor in it
  group.together([&] {
    if (group.rank() != 0) return;
    file.emplace(path);
    within(path, [&] { check_state_dict(network.unsplit(), file->tensors()); });
    for (size_t i = 0; i < file->tensors().size(); ++i) place[file->tensors()[i].name] = i;
  });
  network.await_messages();
  const auto read = [&](StateTensor& tensor) {  // becomes the file's, on all ranks
    group.together([&] {
      if (place.contains(tensor.name)) tensor = file->read(place.at(tensor.name));
    });
    broadcast(tensor.real, network.passes(), comm);
    broadcast(tensor.integer, network.passes(), comm);
  };
  network.load_parameters(read);
  std::map<std::string, StateTensor> running;
  for (StateTensor& tensor : network.running()) {
    read(tensor);
    running.emplace(tensor.name, tensor);
  }
  network.load_running(running);
  if (file) file->say_loaded();
}

/// The stages take turns; all ranks read all parameters.
void MeshParallel::load_parameters(const ReadTensor& read) {
  const auto values_of = [&](const std::string& name) {
    StateTensor whole = blank(name);
    read(whole);
    return whole.real;
  };
  for (size_t stage = 0; stage < names_.size(); ++stage) {
    if (int(stage) == mesh_.coordinate(Axis::pipeline)) {
      sharded_.load_units([&](Unit& unit) {
        for (Parameter* p : unit.parameters()) set(*p, values_of(p->name));
      });
    } else {
      for (const std::string& name : names_[stage]) values_of(name);
    }
  }
}

/// A parameter of the whole network, of zeros.
StateTensor MeshParallel::blank(const std::string& name) const {
  const Shape& shape = whole_shapes_.at(name);
  return {.name = name, .shape = shape, .real = std::vector<Real>(size_t(shape.elements()))};
}

std::vector<Real> MeshParallel::whole_of(std::vector<Real> part, const Shape& part_shape,
                                         const Shape& whole_shape) const {
  if (whole_shape == part_shape) return part;
  await_messages();
  return joined(gathered(part, passes_, ranks_.comm()), whole_shape, part_shape);
}

/// In PyTorch's layout. All ranks along `tensor` call it.
StateTensor MeshParallel::whole_of(StateTensor part) const {
  const Shape shape = whole_shape(part.name, part.shape);
  part.real = whole_of(std::move(part.real), part.shape, shape);
  part.shape = shape;
  return part;
}

std::vector<StateTensor> MeshParallel::running() const {
  std::map<std::string, StateTensor> mine;
  for (const StateTensor& part : running_state(sharded_)) mine[part.name] = whole_of(part);
  std::vector<StateTensor> whole = blank_running_state(*unsplit_);
  for (StateTensor& tensor : whole) {
    if (mine.contains(tensor.name)) tensor = std::move(mine.at(tensor.name));
    from_its_stage(tensor.real);
    from_its_stage(tensor.integer);
  }
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

/// The stages take turns; `use` gets each whole parameter, on all ranks.
void MeshParallel::visit_parameters(const std::function<void(StateTensor whole)>& use) const {
  const auto from_all = [&](StateTensor whole) {
    from_its_stage(whole.real);
    use(std::move(whole));
  };
  for (size_t stage = 0; stage < names_.size(); ++stage) {
    if (int(stage) == mesh_.coordinate(Axis::pipeline)) {
      sharded_.visit_units([&](Unit& unit) {
        for (const Parameter* p : unit.parameters()) from_all(whole_of(state_of(*p)));
      });
    } else {
      for (const std::string& name : names_[stage]) from_all(blank(name));
    }
  }
}

void save_weights(ProcessGroup& group, const std::string& path, MeshParallel& network) {
  if (path.empty()) return;
  const bool writes = group.rank() == 0;
  std::vector<StateTensor> state;
  const auto keep = [&](StateTensor whole) {
    if (writes) state.push_back(std::move(whole));
  };
  network.visit_parameters(keep);
  for (StateTensor& tensor : network.running()) keep(std::move(tensor));
  group.together([&] {
    if (writes) save_weights(path, state);
  });
}

// --- The norm ------------------------------------------------------------------------------------

// [task 07.3] the norm over a mesh
Axes cut_along(ShardKind kind) {
  Axes cut{Axis::tensor, Axis::pipeline};
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
