#include "03-model-split/pipeline/staged_network.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/parse.h"
#include "common/core/stream_backend.h"
#include "common/nn/init.h"

namespace lockstep {

// --- Where to cut --------------------------------------------------------------------------------

namespace {

/// The limit of every way to balance: at most one stage per layer.
void require_stages(int stages, size_t layers, int chunks = 1) {
  require(stages >= 1 && static_cast<size_t>(stages) <= layers,
          "--split: {} stages of {} layers, expected 1 to {}; name fewer devices{}", stages, layers,
          layers, chunks == 1 ? "" : ", or fewer --chunks");
}

Cuts parse_cuts(const std::string& text, size_t layers, int stages, int chunks) {
  Cuts cuts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const auto cut = read_whole(text.substr(begin, comma - begin), 0, 99999);
    require(
        cut.has_value(),
        "--split: found '{}', expected auto, measured, parameters, or the layers with which stages "
        "begin (3,6)",
        text);
    cuts.push_back(size_t(*cut));
    begin = comma + 1;
  }
  require(cuts.size() + 1 == static_cast<size_t>(stages),
          "--split: {} makes {} stages, --devices names {}{}; give one cut less than {}", text,
          cuts.size() + 1, stages / chunks,
          chunks == 1 ? "" : fmt::format(" and each has {} --chunks", chunks),
          chunks == 1 ? "devices" : "devices times chunks");
  for (size_t i = 0; i < cuts.size(); ++i) {
    const size_t lowest = i == 0 ? 1 : cuts[i - 1] + 1;
    require(
        cuts[i] >= lowest && cuts[i] < layers,
        "--split: {}: cut {} leaves a stage without layers; expected rising numbers from 1 to {}",
        text, cuts[i], layers - 1);
  }
  return cuts;
}

}  // namespace

std::vector<LayerCost> probe_layers(const Layers& layers, const Shape& images, Stream stream) {
  constexpr int kRuns = 3;  // the first one warms up
  Context context(stream);
  context.state().copy_from_host({StepState{}});  // dropout reads it
  context.facts.update_running = false;           // and this is no training that counts
  Tensor x = context.empty(images);
  stream.kernels().fill(stream, 1, x);
  std::vector<LayerCost> costs;
  for (const auto& layer : layers) {
    const FlatParameters parameters(*layer, stream);
    initialize(parameters, Initializer::normal, 1);
    LayerCost cost{.name = layer->name()};
    cost.parameter_bytes = static_cast<int64_t>(parameters.values().bytes());
    Tensor y;
    for (int run = 0; run < kRuns; ++run) {
      const double flops = context.flops();
      const TimedEvent begin = stream.record_time();
      y = layer->forward(x, context);
      layer->backward(y, context);
      const double seconds = stream.record_time().seconds_since(begin);
      cost.seconds = run < 2 ? seconds : std::min(cost.seconds, seconds);
      cost.flops = context.flops() - flops;
    }
    costs.push_back(cost);
    x = y;
    for (Parameter* p : layer->parameters()) p->value = p->grad = {};
    for (ModelBuffer* b : layer->buffers()) b->value = {};
  }
  stream.synchronize();
  return costs;
}

Cuts balanced_cuts(const std::vector<double>& costs, int stages) {
  const size_t layers = costs.size();
  require_stages(stages, layers);
  // best[s][n]: if s + 1 stages hold the first n layers, the least possible cost of the costliest.
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(stages, std::vector<double>(layers + 1, kNever));
  std::vector<std::vector<size_t>> cut(stages, std::vector<size_t>(layers + 1, 0));
  for (int s = 0; s < stages; ++s) {
    for (size_t n = s + 1; n <= layers; ++n) {
      double last = 0;  // stage s: layers first to n - 1
      for (size_t first = n; first-- > static_cast<size_t>(s);) {
        last += costs[first];
        if (s == 0 && first > 0) continue;
        const double costliest = s == 0 ? last : std::max(best[s - 1][first], last);
        if (costliest >= best[s][n]) continue;
        best[s][n] = costliest;
        cut[s][n] = first;
      }
    }
  }
  Cuts cuts(stages - 1);
  size_t end = layers;
  for (int s = stages - 1; s > 0; --s) end = cuts[s - 1] = cut[s][end];
  return cuts;
}

Cuts choose_cuts(const std::string& text, const Layers& layers, int stages, const Shape& images,
                 Stream stream, int chunks) {
  require_stages(stages, layers.size(), chunks);
  if (text != "auto" && text != "measured" && text != "parameters") {
    return parse_cuts(text, layers.size(), stages, chunks);
  }
  Shape probe = images;
  if (text != "measured") probe[0] = 2;  // the shares are the same; batch norm needs two
  std::vector<double> costs;
  for (const LayerCost& cost : probe_layers(layers, probe, stream)) {
    costs.push_back(text == "auto"       ? cost.flops
                    : text == "measured" ? cost.seconds
                                         : static_cast<double>(cost.parameter_bytes));
  }
  return balanced_cuts(costs, stages);
}

// --- The pieces ----------------------------------------------------------------------------------

StagedNetwork::StagedNetwork(Layers layers, const Cuts& cuts, const std::vector<Stream>& streams,
                             Precision precision)
    : devices_(streams.size()) {
  const size_t stages = cuts.size() + 1;
  require(stages % devices_ == 0,
          "StagedNetwork: stages by the cuts: found {}, expected a multiple of the {} devices",
          stages, devices_);
  for (size_t s = 0; s < stages; ++s) {
    const size_t begin = s == 0 ? 0 : cuts[s - 1];
    const size_t end = s < cuts.size() ? cuts[s] : layers.size();
    require(begin < end && end <= layers.size(),
            "StagedNetwork: stage {} would be layers {} to {} of {}; every stage needs one", s,
            begin, end, layers.size());
    auto piece = std::make_unique<Sequential>();
    for (size_t i = begin; i < end; ++i) {
      const std::string name = layers[i]->name();
      piece->add(name, std::move(layers[i]));
    }
    const Stream stream = streams[s % devices_];
    Sequential& added = add_module("", std::move(piece));
    stages_.push_back({stream, &added, std::make_unique<FlatParameters>(added, stream, precision)});
    if (s > 0) contexts_.push_back(std::make_unique<Context>(stream, precision));
  }
  for (size_t d = 0; d < devices_; ++d) streams[d].backend().set_owner(device_text(d));
}

std::vector<size_t> StagedNetwork::stages_on(size_t device) const {
  std::vector<size_t> found;
  for (size_t s = device; s < stages_.size(); s += devices_) found.push_back(s);
  return found;
}

std::string StagedNetwork::numbers_text(const std::vector<size_t>& stages) {
  return fmt::format("stage{} {}", stages.size() == 1 ? "" : "s", fmt::join(stages, " and "));
}

std::string StagedNetwork::layers_text(const std::vector<size_t>& stages) const {
  std::vector<std::string> texts;
  for (const size_t stage : stages) {
    const auto& layers = stages_[stage].layers->children();
    const std::string first = layers.front()->name();
    texts.push_back(layers.size() == 1 ? first : first + " to " + layers.back()->name());
  }
  return fmt::format("{}", fmt::join(texts, " and "));
}

std::string StagedNetwork::text_of(const std::vector<size_t>& stages) const {
  return fmt::format("{} ({}, {})", numbers_text(stages),
                     stages_[stages.front()].stream.device().name(), layers_text(stages));
}

// --- The naive way -------------------------------------------------------------------------------

void StagedNetwork::share_facts(size_t stage, Context& first) {
  Context& context = context_of(stage, first);
  const Stream stream = stages_[stage].stream;
  context.facts = first.facts;
  stream.wait(first.stream().record());
  stream.copy(context.state().data(), first.state().data(), sizeof(StepState));
  first.stream().wait(stream.record());
}

AnyTensor StagedNetwork::forward(const AnyTensor& x, Context& context) {
  AnyTensor y = x;
  for (size_t s = 0; s < stages_.size(); ++s) {
    within(text(s), [&] {
      Context& own = context_of(s, context);
      if (s > 0) {
        share_facts(s, context);
        y = copied_to(y, own);
      }
      const double flops_before = own.flops();
      y = stages_[s].layers->forward(y, own);
      if (s > 0) context.add_flops(own.flops() - flops_before);
    });
  }
  return stages_.size() == 1 ? y : copied_to(y, context);
}

AnyTensor StagedNetwork::backward(const AnyTensor& dy, Context& context) {
  AnyTensor dx = dy;
  for (size_t s = stages_.size(); s-- > 0;) {
    within(text(s), [&] {
      Context& own = context_of(s, context);
      if (stages_.size() > 1) dx = copied_to(dx, own);
      const double flops_before = own.flops();
      dx = stages_[s].layers->backward(dx, own);
      if (s > 0) context.add_flops(own.flops() - flops_before);
    });
  }
  return dx;
}

}  // namespace lockstep
