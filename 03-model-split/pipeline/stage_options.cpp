#include "03-model-split/pipeline/stage_options.h"

#include <algorithm>

#include "03-model-split/pipeline/timetable.h"
#include "common/core/error.h"

namespace lockstep {

void PipelineProgramOptions::add_to(OptionParser& parser) {
  parser.begin_group("Network");
  parser.add("--split", split,
             "the layers with which stages begin (3,6), or what is to be balanced: auto "
             "(operations), measured (time), parameters (bytes)");
  parser.begin_group("Training");
  parser.add("--schedule", schedule, "naive, gpipe or 1f1b");
  parser.add("--micro-batches", micro_batches, "parts of a batch; 0: 4, in the naive schedule 1",
             {0, 1024});
  parser.add_flag("--recompute", recompute,
                  "run each forward again before its backward instead of keeping its work");
  parser.begin_group("Output");
  parser.add_flag("--print-schedule", print_schedule,
                  "draw the timetable for these devices and micro-batches, and end");
  parser.add_elsewhere("--tensor-split", "tensor-split", "--layers");
  parser.check_afterwards([this, &parser] {
    parse_schedule(schedule);
    require(!print_schedule || !parser.given("--baseline"),
            "--print-schedule: trains nothing that --baseline could measure; leave one of them "
            "out");
  });
}

int PipelineProgramOptions::micro_batch_count() const {
  const int automatic = parse_schedule(schedule) == ScheduleKind::naive ? 1 : 4;
  return micro_batches > 0 ? micro_batches : automatic;
}

std::string PipelineProgramOptions::timetable(size_t stages) const {
  return draw(parse_schedule(schedule), static_cast<int>(stages), micro_batch_count());
}

std::string PipelineProgramOptions::emulation() const {
  return fmt::format("micro:{}", micro_batch_count());
}

Pipeline make_pipeline(Model& model, const Options& options, const PipelineProgramOptions& own,
                       const Dataset& set, const std::vector<Stream>& streams) {
  Layers layers = dynamic_cast<Sequential&>(*model.network).release_layers();
  const Shape micro_batch{std::max<int64_t>(2, options.batch_size / own.micro_batch_count()),
                          set.height, set.width,
                          set.channels};  // batch normalisation needs two samples
  const Cuts cuts =
      choose_cuts(own.split, layers, static_cast<int>(streams.size()), micro_batch, streams[0]);
  Pipeline pipeline(std::make_unique<StagedNetwork>(std::move(layers), cuts, streams), *model.loss,
                    set, options.optimizer_rule(),
                    {parse_schedule(own.schedule), own.micro_batch_count(), own.recompute});
  pipeline.require_samples(options.smallest_batch(set.count()));
  return pipeline;
}

}  // namespace lockstep
