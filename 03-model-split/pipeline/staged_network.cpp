#include "03-model-split/pipeline/staged_network.h"

#include <fmt/ranges.h>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {

StagedNetwork::StagedNetwork(Layers layers, const Cuts& cuts, const std::vector<Stream>& streams)
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
    stages_.push_back({stream, &added, std::make_unique<FlatParameters>(added, stream)});
    if (s > 0) contexts_.push_back(std::make_unique<Context>(stream));
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

Tensor StagedNetwork::forward(const Tensor& x, Context& context) {
  Tensor y = x;
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

Tensor StagedNetwork::backward(const Tensor& dy, Context& context) {
  Tensor dx = dy;
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
