#include "03-model-split/split_options.h"

#include "03-model-split/pipeline.h"
#include "03-model-split/tensor_training.h"
#include "common/core/error.h"

namespace lockstep {

void SplitOptions::add_to(OptionParser& parser) {
  parser.add("--split", split,
             "the layers with which stages begin (3,6), or what is to be balanced: auto "
             "(operations), measured (time), parameters (bytes)");
  parser.add("--schedule", schedule, "naive, gpipe or 1f1b");
  parser.add("--micro-batches", micro_batches, "parts of a batch; 0: 4, in the naive schedule 1",
             {0, 1024});
  parser.add_flag("--recompute", recompute,
                  "run each forward again before its backward instead of keeping its work");
  parser.add_flag("--print-schedule", print_schedule,
                  "draw the timetable for these devices and micro-batches, and end");
  parser.add("--tensor-split", tensor_split,
             "no pipeline: split inside the layers, auto (all that divide) or by name "
             "(conv2,fc1)");
  parser.check_afterwards([this, &parser] {
    parse_schedule(schedule);
    for (const char* option :
         {"--split", "--schedule", "--micro-batches", "--recompute", "--print-schedule"}) {
      require(!inside_layers() || !parser.given(option),
              "{}: for a network cut between its layers, --tensor-split cuts inside them; leave "
              "one of the two out",
              option);
    }
    require(!print_schedule || !parser.given("--baseline"),
            "--print-schedule: trains nothing that --baseline could measure; leave one of them "
            "out");
  });
}

int SplitOptions::parts() const {
  const int automatic = inside_layers() || parse_schedule(schedule) == ScheduleKind::naive ? 1 : 4;
  return micro_batches > 0 ? micro_batches : automatic;
}

std::string SplitOptions::timetable(size_t stages) const {
  return draw(parse_schedule(schedule), static_cast<int>(stages), parts());
}

std::string SplitOptions::emulation() const {
  return inside_layers() ? "none" : fmt::format("micro:{}", parts());
}

// --- The training --------------------------------------------------------------------------------

namespace {

std::unique_ptr<SplitTraining> make_pipeline(Model& model, const Options& options,
                                             const SplitOptions& split, const Dataset& set,
                                             const std::vector<Stream>& streams) {
  Layers layers = dynamic_cast<Sequential&>(*model.network).release_layers();
  const Shape micro_batch{std::max<int64_t>(2, options.batch_size / split.parts()), set.height,
                          set.width, set.channels};  // batch normalisation needs two samples
  const Cuts cuts =
      choose_cuts(split.split, layers, static_cast<int>(streams.size()), micro_batch, streams[0]);
  auto pipeline = std::make_unique<Pipeline>(
      std::make_unique<LayerSplit>(std::move(layers), cuts, streams), *model.loss, set,
      options.sgd_rule(),
      PipelineOptions{parse_schedule(split.schedule), split.parts(), split.recompute});
  pipeline->require_samples(options.smallest_batch(set.count()));
  return pipeline;
}

}  // namespace

std::unique_ptr<SplitTraining> split_model(Model& model, const Options& options,
                                           const SplitOptions& split, const Dataset& set,
                                           const std::vector<Stream>& streams, LocalWorld& world) {
  if (!split.inside_layers()) return make_pipeline(model, options, split, set, streams);
  std::optional<TensorSplit::Names> names;
  if (split.tensor_split != TensorSplit::Names{"auto"}) names = split.tensor_split;
  const ModelOptions network = options.model_options(set);
  auto shards = std::make_unique<TensorSplit>(network, streams, world, names);
  require(world.size() == 1 || !shards->split_layers().empty(),
          "--tensor-split auto: no layer of {} divides by {} devices; give another number",
          options.model, world.size());
  return std::make_unique<TensorTraining>(std::move(shards), *model.loss, network, set,
                                          options.sgd_rule());
}

}  // namespace lockstep
