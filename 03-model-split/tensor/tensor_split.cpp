#include "03-model-split/tensor/tensor_split.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "common/core/error.h"
#include "common/io/json.h"
#include "common/nn/residual.h"
#include "common/training/weights_file.h"

namespace lockstep {

// --- From the unsplit network to the split one ---------------------------------------------------

namespace {

/// Works on each channel by itself, so that a rank can do it with its own channels.
bool is_per_channel(const Module& layer) {
  return dynamic_cast<const BatchNorm2d*>(&layer) || dynamic_cast<const Dropout2d*>(&layer) ||
         dynamic_cast<const MaxPool2d*>(&layer) || dynamic_cast<const Flatten*>(&layer);
}

/// The number that must divide by the ranks if the layer is to be split; 0: it cannot be split.
int64_t divisible(const Module& layer, ModelKind kind) {
  if (const auto* residual = dynamic_cast<const Residual*>(&layer)) {
    return residual->conv1().out_channels();
  }
  if (kind == ModelKind::mlp) {
    const auto* linear = dynamic_cast<const Linear*>(&layer);
    const bool hidden = linear != nullptr && linear->activation() != Activation::none;
    return hidden ? linear->out_features() : 0;  // equally many in and out, but for the pixels
  }
  if (layer.name() == "conv2") return dynamic_cast<const Conv2d&>(layer).out_channels();
  if (layer.name() == "fc1") return dynamic_cast<const Linear&>(layer).in_features();
  return 0;
}

/// A module of type M with its final name.
template <class M, class... Args>
std::unique_ptr<M> named(const std::string& name, Args&&... args) {
  auto module = std::make_unique<M>(std::forward<Args>(args)...);
  module->set_name(name);
  return module;
}

/// conv1 is split by output channels, conv2 by input channels, and bn1 works on the rank's
/// channels; the shortcut and bn2 are whole.
std::unique_ptr<Module> split_residual(const Residual& whole, SplitRanks& ranks) {
  std::unique_ptr<Conv2d> conv3;
  if (const Conv2d* shortcut = whole.conv3()) {
    conv3 = std::make_unique<Conv2d>(shortcut->in_channels(), shortcut->out_channels(),
                                     shortcut->options());
  }
  auto conv1 = std::make_unique<ColumnConv2d>(whole.conv1(), ranks);  // says first what is wrong
  auto conv2 = std::make_unique<RowConv2d>(whole.conv2(), ranks);
  return named<Residual>(whole.name(), std::move(conv1), std::move(conv2), std::move(conv3));
}

/// A layer that works per channel, for this rank's channels.
std::unique_ptr<Module> on_channels(std::unique_ptr<Module> layer, int64_t channels, int rank) {
  if (const auto* norm = dynamic_cast<const BatchNorm2d*>(layer.get())) {
    return named<BatchNorm2d>(norm->name(), channels, norm->activation());
  }
  if (auto* dropout = dynamic_cast<Dropout2d*>(layer.get())) {
    dropout->set_first_feature(rank * channels);  // part of the unsplit layer's mask
  }
  return layer;
}

}  // namespace

TensorSplit::TensorSplit(const ModelOptions& options, SplitRanks& ranks,
                         const std::optional<Names>& layers)
    : unsplit_(make_model(options).network), kind_(options.kind), ranks_(ranks) {
  const Model model = make_model(options);
  Layers whole = dynamic_cast<Sequential&>(*model.network).release_layers();
  choose(layers, whole);
  for (std::unique_ptr<Module>& layer : whole) {
    if (std::ranges::count(split_, layer->name()) > 0) {
      append_split(std::move(layer));
    } else if (split_channels_ > 0 && is_per_channel(*layer)) {
      append(on_channels(std::move(layer), split_channels_ / ranks.world_size(), ranks.rank()));
    } else {
      make_whole(*layer);
      append(std::move(layer));
    }
  }
  skip_input_gradient();  // a layer that was replaced knew that nobody needs that of the images
}

void TensorSplit::choose(const std::optional<Names>& asked, const Layers& layers) {
  Names can, widths;
  for (const auto& layer : layers) {
    const int64_t number = divisible(*layer, kind_);
    if (number == 0) continue;
    can.push_back(layer->name());
    widths.push_back(fmt::format("{} has {}", layer->name(), number));
    const bool wanted = asked ? std::ranges::count(*asked, layer->name()) > 0
                              : ranks_.world_size() > 1 && number % ranks_.world_size() == 0;
    if (wanted) split_.push_back(layer->name());
  }
  for (const std::string& name : asked.value_or(Names())) {
    require(std::ranges::count(can, name) == 1,
            "--layers: '{}' cannot be split in this network; choose from {}", name,
            fmt::join(can, ", "));
    require(std::ranges::count(*asked, name) == 1,
            "--layers: found '{}' twice, expected each layer once; leave out the others", name);
  }
  if (asked || ranks_.world_size() == 1 || !split_.empty()) return;
  require(!can.empty(),
          "this network has no layer that can be split over {} ranks; use one rank, or another "
          "--model",
          ranks_.world_size());
  fail<BadInput>(
      "no layer of this network divides by {} ranks ({}); use a number that divides one of them",
      ranks_.world_size(), fmt::join(widths, ", "));
}

void TensorSplit::append(std::unique_ptr<Module> layer) {
  const std::string name = layer->name();
  add(name, std::move(layer));
}

void TensorSplit::append_split(std::unique_ptr<Module> whole) {
  const std::string name = whole->name();
  if (const auto* linear = dynamic_cast<const Linear*>(whole.get())) {
    if (split_channels_ == 0 && kind_ == ModelKind::mlp) {  // the first of two
      append(named<ColumnLinear>(name, *linear, ranks_));
      split_channels_ = linear->out_features();
      return;
    }
    if (split_channels_ == 0) append(named<TakeChannels>(name + ".take", ranks_));
    append(named<RowLinear>(name, *linear, ranks_));
    split_channels_ = 0;
    return;
  }
  make_whole(*whole);
  if (const auto* residual = dynamic_cast<const Residual*>(whole.get())) {
    return append(split_residual(*residual, ranks_));
  }
  const auto& convolution = dynamic_cast<const Conv2d&>(*whole);
  append(named<ColumnConv2d>(name, convolution, ranks_));
  split_channels_ = convolution.out_channels();
}

/// The activation before this layer becomes whole.
void TensorSplit::make_whole(const Module& before) {
  if (split_channels_ > 0) append(named<JoinChannels>(before.name() + ".join", ranks_));
  split_channels_ = 0;
}

// --- The state -----------------------------------------------------------------------------------

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

/// The shape of `tensor` in a network with these shapes.
Shape shape_in(const Shapes& shapes, const StateTensor& tensor) {
  const auto found = shapes.find(tensor.name);  // num_batches_tracked is in no shapes
  return found == shapes.end() ? tensor.shape : found->second;
}

Stream stream_of(Module& network) { return network.parameters().front()->value.home(); }

}  // namespace

std::vector<Real> part_of(const std::vector<Real>& whole, const Shape& whole_shape,
                          const Shape& part_shape, int rank) {
  if (part_shape == whole_shape) return whole;
  std::vector<Real> part(static_cast<size_t>(part_shape.elements()));
  for_each_run(whole_shape, part_shape, rank, [&](int64_t from, int64_t to, int64_t count) {
    std::copy_n(whole.begin() + from, count, part.begin() + to);
  });
  return part;
}

std::vector<Real> joined(const std::vector<Real>& parts, const Shape& whole_shape,
                         const Shape& part_shape) {
  std::vector<Real> whole(parts.size());
  const int64_t length = part_shape.elements();
  for (int rank = 0; rank < int(std::ssize(parts) / length); ++rank) {
    for_each_run(whole_shape, part_shape, rank, [&](int64_t to, int64_t from, int64_t count) {
      std::copy_n(parts.begin() + rank * length + from, count, whole.begin() + to);
    });
  }
  return whole;
}

std::vector<Real> gathered(const std::vector<Real>& mine, Stream stream, Communicator& comm) {
  const int64_t count = std::ssize(mine);
  const Tensor all = Tensor::empty(stream, {comm.world_size() * count});
  comm.all_gather(stream, Tensor::from_host(stream, {count}, mine), all);
  return all.to_host();
}

Optimizer TensorSplit::optimizer(const FlatParameters& parameters, const OptimizerRule& rule) {
  if (rule.growth_interval > 0) {
    gradients_ = parameters.gradients();
    overflow_ = OverflowNumber(Tensor::empty(parameters.stream(), {1}));
  }
  return Optimizer(parameters, rule, overflow_.number());
}

AnyTensor TensorSplit::backward(const AnyTensor& dy, Context& context) {
  AnyTensor dx = Sequential::backward(dy, context);
  if (!gradients_.defined()) return dx;
  const Stream stream = context.stream();
  stream.kernels().fill(stream, 0, overflow_.number());
  stream.kernels().check_finite(stream, context.state(), gradients_, overflow_.found());
  overflow_.write(stream);
  ranks_.add_overflows(overflow_, context);
  return dx;
}

int64_t TensorSplit::parameter_count() const {
  int64_t count = 0;
  for (const Parameter* parameter : unsplit_->parameters()) count += parameter->shape.elements();
  return count;
}

void TensorSplit::check_full_state(const std::vector<StateTensor>& state) const {
  check_state_dict(*unsplit_, state);
}

/// This rank's part of a tensor of the unsplit network, of this shape.
StateTensor TensorSplit::my_part(const StateTensor& whole, const Shape& shape) const {
  if (shape == whole.shape) return whole;
  return {.name = whole.name,
          .shape = shape,
          .real = part_of(whole.real, whole.shape, shape, ranks_.rank())};
}

void TensorSplit::initialize(Initializer initializer, uint64_t seed) {
  const std::vector<Parameter*> all = unsplit_->parameters(), mine = parameters();
  for (size_t i = 0; i < all.size(); ++i) {
    const std::vector<Real> part =
        part_of(first_values(*all[i], initializer, seed), torch_shape(*all[i]),
                torch_shape(*mine[i]), ranks_.rank());
    mine[i]->value.copy_from_host(from_torch_layout(*mine[i], part));
  }
}

void TensorSplit::load_full_state(const std::vector<StateTensor>& state) {
  check_full_state(state);
  const Shapes shapes = shapes_of(*this);
  std::vector<StateTensor> parts;
  for (const StateTensor& whole : state) parts.push_back(my_part(whole, shape_in(shapes, whole)));
  load_state_dict(*this, parts);
}

std::vector<StateTensor> TensorSplit::full_state() {
  const Shapes shapes = shapes_of(*unsplit_);
  std::vector<StateTensor> full = state_dict(*this);
  for (StateTensor& tensor : full) {
    const Shape shape = shape_in(shapes, tensor), part = tensor.shape;
    if (shape == part) continue;
    tensor.shape = shape;
    tensor.real = joined(gathered(tensor.real, stream_of(*this), ranks_.comm()), shape, part);
  }
  check_full_state(full);  // nothing is missing
  return full;
}

// --- What the options ask for --------------------------------------------------------------------

void TensorProgramOptions::add_to(OptionParser& parser) {
  Options::add_to(parser);
  ranks.add_to(parser);
  parser.begin_group("Network");
  parser.add("--layers", layers,
             "layers to split over the ranks: auto (all that the number of ranks divides), or "
             "names (conv2,fc1)");
}

TensorSplit& split_network(Model& model, const Dataset& images, SplitRanks& ranks,
                           ProcessGroup& group, const TensorProgramOptions& options) {
  group.together([&] {
    const auto split = [&](const std::optional<TensorSplit::Names>& layers) {
      model.network = std::make_unique<TensorSplit>(options.model_options(images), ranks, layers);
    };
    if (options.layers != TensorSplit::Names{"auto"}) return split(options.layers);
    within("--layers auto", [&] { split({}); });
  });
  return static_cast<TensorSplit&>(*model.network);
}

void load_weights(ProcessGroup& group, const std::string& path, TensorSplit& network) {
  if (path.empty()) return;
  std::vector<StateTensor> state = network.full_state();  // their names and shapes, on all ranks
  group.together([&] {
    if (group.rank() != 0) return;
    load_weights(path, [&](const std::vector<StateTensor>& found) {
      network.check_full_state(found);
      for (StateTensor& tensor : state) {
        const auto same = std::ranges::find(found, tensor.name, &StateTensor::name);
        if (same != found.end()) tensor = *same;
      }
    });
  });
  for (StateTensor& tensor : state) {
    broadcast(tensor.real, stream_of(network), network.ranks().comm());
    broadcast(tensor.integer, stream_of(network), network.ranks().comm());
  }
  network.load_full_state(state);
}

void save_weights(ProcessGroup& group, const std::string& path, TensorSplit& network) {
  if (path.empty()) return;
  const std::vector<StateTensor> state = network.full_state();
  group.together([&] {
    if (group.rank() == 0) save_weights(path, state);
  });
}

// --- What was exchanged --------------------------------------------------------------------------

void report(TensorSplit& network, TrainingLog& log) {
  SplitRanks& ranks = network.ranks();
  const double steps = double(std::max<int64_t>(log.own_steps(), 1));
  const double seconds = ranks.seconds_waited() / steps;  // waits: then all is counted
  const double sent = double(ranks.comm().bytes_sent(Purpose::activations)) / steps;
  const auto calls = [&](const Traffic& of) {
    return fmt::format("{:.4g} all-reduces, {:.4g} all-gathers", double(of.all_reduces) / steps,
                       double(of.all_gathers) / steps);
  };
  log.note("split layers", fmt::format("{}", fmt::join(network.split_names(), ", ")));
  Traffic all;
  for (const auto& [layer, traffic] : ranks.traffic()) {
    log.note("  " + layer,
             fmt::format("{}, {:.1f} KiB by sizes", calls(traffic), traffic.bytes / steps / 1024));
    all.all_reduces += traffic.all_reduces;
    all.all_gathers += traffic.all_gathers;
    all.bytes += traffic.bytes;
  }
  const double predicted = all.bytes / steps;
  log.note("per step",
           fmt::format("{}: {:.1f} KiB sent by rank 0, counted in {}; by sizes {:.1f} ({}); waited "
                       "{:.2f} ms within compute",
                       calls(all), sent / 1024, ranks.comm().bytes_counted_in(), predicted / 1024,
                       beside_formula(sent, predicted), 1e3 * seconds),
           "tensor_split",
           {{"layers", network.split_names()},
            {"seconds_per_step", seconds},
            {"per_step",
             {{"all_reduces", double(all.all_reduces) / steps},
              {"all_gathers", double(all.all_gathers) / steps},
              {"bytes", sent}}},
            {"predicted_bytes_per_step", predicted}});
}

}  // namespace lockstep
