#include "03-model-split/tensor/tensor_split.h"

#include <fmt/ranges.h>

#include <map>

#include "03-model-split/tensor/row_and_column.h"
#include "common/app/counted.h"
#include "common/io/json.h"
#include "common/kernels/devices.h"

namespace lockstep {
namespace {

/// The unsplit network's layers in order, without memory, with their names.
Layers unsplit_layers(const ModelOptions& options) {
  return dynamic_cast<Sequential&>(*make_model(options).network).release_layers();
}

/// Works on each channel by itself, so that a rank can do it with its own channels.
bool is_per_channel(const Module& layer) {
  return dynamic_cast<const BatchNorm2d*>(&layer) || dynamic_cast<const Dropout2d*>(&layer) ||
         dynamic_cast<const MaxPool2d*>(&layer) || dynamic_cast<const Flatten*>(&layer);
}

/// The number that must divide by the ranks if the layer is to be split; 0: it cannot be split.
int64_t divisible(const Module& layer) {
  if (const auto* residual = dynamic_cast<const Residual*>(&layer)) {
    return residual->conv1().out_channels();
  }
  if (layer.name() == "conv2") return dynamic_cast<const Conv2d&>(layer).out_channels();
  if (layer.name() == "fc1") return dynamic_cast<const Linear&>(layer).in_features();
  return 0;
}

}  // namespace

// --- From the unsplit network to the split one ---------------------------------------------------

/// Goes through the layers of the unsplit network and appends the layers that replace them.
class TensorSplit::Builder {
 public:
  Builder(TensorSplit& split, const ModelOptions& options) : split_(split) {
    for (int r = 0; r < split.world_size(); ++r) of_rank_.push_back(unsplit_layers(options));
  }

  /// The names of the layers to be split, in order.
  Names choose(const std::optional<Names>& asked) const {
    Names can, chosen;
    for (const auto& layer : of_rank_[0]) {
      const int64_t number = divisible(*layer);
      if (number == 0) continue;
      can.push_back(layer->name());
      const bool wanted = asked ? std::ranges::count(*asked, layer->name()) > 0
                                : split_.world_size() > 1 && number % split_.world_size() == 0;
      if (wanted) chosen.push_back(layer->name());
    }
    for (const std::string& name : asked.value_or(Names())) {
      require(std::ranges::count(can, name) == 1,
              "--layers: '{}' cannot be split in this network; choose from {}", name,
              fmt::join(can, ", "));
      require(std::ranges::count(*asked, name) == 1, "--layers: '{}' twice, expected once", name);
    }
    return chosen;
  }

  void build() {
    for (size_t i = 0; i < of_rank_[0].size(); ++i) {
      const Module& layer = *of_rank_[0][i];
      if (std::ranges::count(split_.split_, layer.name()) > 0) {
        append_split(layer);
      } else if (split_channels_ > 0 && is_per_channel(layer)) {
        append<LocalLayer>(layer.name(), split_.trees_, [&](int r) { return part_of(i, r); });
      } else {
        make_whole(layer);
        append<LocalLayer>(layer.name(), split_.trees_,
                           [&](int r) { return std::move(of_rank_[r][i]); });
      }
    }
  }

 private:
  template <class L, class... Args>
  void append(Args&&... args) {
    split_.layers_.push_back(std::make_unique<L>(std::forward<Args>(args)...));
  }

  void append_split(const Module& layer) {
    const RankModules& trees = split_.trees_;
    if (const auto* linear = dynamic_cast<const Linear*>(&layer)) {
      if (split_channels_ == 0) append<TakeChannels>(layer.name() + ".take", trees);
      append<RowLinear>(*linear, trees);
      split_channels_ = 0;
      return;
    }
    make_whole(layer);
    if (const auto* residual = dynamic_cast<const Residual*>(&layer)) {
      append<ParallelResidual>(*residual, trees);
      return;
    }
    const auto& convolution = dynamic_cast<const Conv2d&>(layer);
    append<ColumnConv2d>(convolution, trees);
    split_channels_ = convolution.out_channels();
  }

  /// The activation before `layer` becomes whole.
  void make_whole(const Module& layer) {
    if (split_channels_ > 0) append<JoinChannels>(layer.name() + ".join", split_.trees_);
    split_channels_ = 0;
  }

  /// Layer i for rank r's channels.
  std::unique_ptr<Module> part_of(size_t i, int r) {
    const int64_t channels = split_channels_ / split_.world_size();
    std::unique_ptr<Module> whole = std::move(of_rank_[r][i]);
    if (const auto* norm = dynamic_cast<const BatchNorm2d*>(whole.get())) {
      auto part = std::make_unique<BatchNorm2d>(channels, norm->activation());
      part->set_name(norm->name());
      return part;
    }
    if (auto* dropout = dynamic_cast<Dropout2d*>(whole.get())) {
      dropout->set_first_feature(r * channels);  // part of the unsplit layer's mask
    }
    return whole;
  }

  TensorSplit& split_;
  std::vector<Layers> of_rank_;  // per rank the unsplit layers; they become the whole ones
  int64_t split_channels_ = 0;   // of the activation after the layers so far; 0: it is whole
};

TensorSplit::TensorSplit(const ModelOptions& options, const std::vector<Stream>& streams,
                         SingleProcessWorld& world, const std::optional<Names>& layers)
    : options_(options), unsplit_(make_model(options).network), trees_(world), streams_(streams) {
  require(streams.size() == size_t(world.world_size()),
          "TensorSplit: {} streams for a world of {} ranks; give each rank one", streams.size(),
          world.world_size());
  Builder builder(*this, options);
  split_ = builder.choose(layers);
  builder.build();
  for (int r = 0; r < world_size(); ++r) {
    parameters_.push_back(std::make_unique<FlatParameters>(module(r), streams_[r]));
  }
}

// --- The passes ----------------------------------------------------------------------------------

void TensorSplit::require_one_per_rank(const Tensors& tensors, const Contexts& contexts) const {
  require(tensors.size() == streams_.size() && contexts.size() == streams_.size(),
          "TensorSplit: {} tensors and {} contexts for {} ranks; give each rank one of both",
          tensors.size(), contexts.size(), world_size());
  for (int r = 0; r < world_size(); ++r) {
    require(contexts[r]->stream() == streams_[r],
            "TensorSplit: rank {} works on stream {} of {}, its context is on {} of {}", r,
            streams_[r].name(), streams_[r].device().name(), contexts[r]->stream().name(),
            contexts[r]->stream().device().name());
  }
}

Tensors TensorSplit::forward(const Tensors& images, const Contexts& contexts) {
  require_one_per_rank(images, contexts);
  Tensors y = images;
  for (const auto& layer : layers_) {
    if (contexts[0]->facts.training) expected_ += layer->predicted(y[0].shape());
    y = layer->forward(y, contexts);
  }
  return y;
}

void TensorSplit::backward(const Tensors& scores_gradients, const Contexts& contexts) {
  require_one_per_rank(scores_gradients, contexts);
  Tensors dx = scores_gradients;
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
    dx = (*layer)->backward(dx, contexts);
  }
}

// --- The state -----------------------------------------------------------------------------------

int64_t TensorSplit::parameter_count() const {
  int64_t count = 0;
  for (const Parameter* parameter : unsplit_->parameters()) count += parameter->shape.elements();
  return count;
}

void TensorSplit::initialize(Initializer initializer, uint64_t seed) {
  // Parameters are drawn as whole tensors, so the whole network is made first, in host memory.
  const std::unique_ptr<Device> host = open_device({DeviceId::Kind::cpu, 0}, {});
  const Model whole = make_model(options_);
  const FlatParameters parameters(*whole.network, host->create_stream("initialize"));
  lockstep::initialize(parameters, initializer, seed);
  load_full_state(state_dict(*whole.network));
}

namespace {

using Shapes = std::map<std::string, Shape>;

/// PyTorch's shapes of a network's parameters and running statistics.
Shapes shapes_of(Module& network) {
  Shapes shapes;
  for (const Parameter* p : network.parameters()) shapes[p->name] = torch_shape(*p);
  for (const ModelBuffer* b : network.buffers()) shapes[b->name] = b->shape;
  return shapes;
}

/// Calls visit(place in `whole`, place in `shard`, length) for each run of elements that are
/// contiguous in both. The shapes differ in one extent: a shard is rank r's range of that extent.
template <class Visit>
void for_each_run(const Shape& whole, const Shape& shard, int rank, Visit visit) {
  int64_t before = 1;  // rows before the extent that differs
  for (int axis = 0; whole[axis] == shard[axis]; ++axis) before *= whole[axis];
  const int64_t length = shard.elements() / before, stride = whole.elements() / before;
  for (int64_t i = 0; i < before; ++i) visit(i * stride + rank * length, i * length, length);
}

/// Whether a state with these shapes has another shape for `tensor`.
bool differs(const StateTensor& tensor, const Shapes& shapes) {
  const auto found = shapes.find(tensor.name);  // num_batches_tracked is in no shapes
  return found != shapes.end() && !(found->second == tensor.shape);
}

}  // namespace

void TensorSplit::load_full_state(const std::vector<StateTensor>& state) {
  check_state_dict(*unsplit_, state);
  for (int r = 0; r < world_size(); ++r) {
    const Shapes shard_shapes = shapes_of(module(r));
    std::vector<StateTensor> part = state;
    for (StateTensor& tensor : part) {
      if (!differs(tensor, shard_shapes)) continue;
      const StateTensor whole = tensor;
      tensor.shape = shard_shapes.at(tensor.name);
      tensor.real.resize(static_cast<size_t>(tensor.shape.elements()));
      for_each_run(whole.shape, tensor.shape, r, [&](int64_t from, int64_t to, int64_t length) {
        std::copy_n(whole.real.begin() + from, length, tensor.real.begin() + to);
      });
    }
    load_state_dict(module(r), part);
  }
}

std::vector<StateTensor> TensorSplit::full_state() const {
  std::vector<std::vector<StateTensor>> parts;
  for (int r = 0; r < world_size(); ++r) parts.push_back(state_dict(module(r)));
  const Shapes whole_shapes = shapes_of(*unsplit_);
  std::vector<StateTensor> full = parts[0];
  for (size_t i = 0; i < full.size(); ++i) {
    StateTensor& whole = full[i];
    if (!differs(whole, whole_shapes)) continue;
    whole.shape = whole_shapes.at(whole.name);
    whole.real.resize(static_cast<size_t>(whole.shape.elements()));
    for (int r = 0; r < world_size(); ++r) {
      const StateTensor& part = parts[r][i];
      for_each_run(whole.shape, part.shape, r, [&](int64_t to, int64_t from, int64_t length) {
        std::copy_n(part.real.begin() + from, length, whole.real.begin() + to);
      });
    }
  }
  check_state_dict(*unsplit_, full);  // nothing is missing
  return full;
}

// --- What was exchanged --------------------------------------------------------------------------

Traffic TensorSplit::traffic() const {
  Traffic sum;
  for (const auto& layer : layers_) sum += layer->traffic();
  return sum;
}

void TensorSplit::report(TrainingLog& log) const {
  const double steps = double(std::max<int64_t>(1, log.steps()));
  const auto as_json = [&](const Traffic& traffic) {
    return nlohmann::json{{"all_reduces", double(traffic.all_reduces) / steps},
                          {"all_gathers", double(traffic.all_gathers) / steps},
                          {"bytes", double(traffic.bytes) / steps}};
  };
  const nlohmann::json moved = as_json(traffic()), expected = as_json(expected_);
  const auto text = [](const nlohmann::json& of) {
    return fmt::format("{} all-reduces, {} all-gathers, {:.1f} KiB",
                       of["all_reduces"].get<double>(), of["all_gathers"].get<double>(),
                       of["bytes"].get<double>() / 1024);
  };
  log.note("split layers", fmt::format("{}", fmt::join(split_, ", ")));
  for (const auto& layer : layers_) {
    if (layer->traffic() == Traffic()) continue;
    log.note("  " + layer->name(), text(as_json(layer->traffic())));
  }
  const std::string& where = trees_.world().communicator(0).bytes_counted_in();
  log.note("per step",
           fmt::format("{} sent by rank 0, counted in {}; by sizes {} ({})", text(moved), where,
                       text(expected), beside_formula(moved["bytes"], expected["bytes"])),
           "tensor_split",
           {{"layers", split_}, {"per_step", moved}, {"predicted_per_step", expected}});
}

}  // namespace lockstep
