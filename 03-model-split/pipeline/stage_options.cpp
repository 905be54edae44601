#include "03-model-split/pipeline/stage_options.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/core/text.h"

namespace lockstep {

void PipelineProgramOptions::add_to(OptionParser& parser) {
  Options::add_to(parser);
  parser.begin_group("Network");
  parser.add("--split", split,
             "where to cut the network: the first layers of the later stages (3,6), or what to "
             "balance: auto (operations), measured (time), parameters (bytes)");
  parser.begin_group("Training");
  parser.add("--schedule", schedule_kind, "order of the micro-batches' forwards and backwards");
  parser.add("--chunks", chunks, "stages on a device; 0: 2 if interleaved, else 1", {0, 64});
  parser.add("--micro-batches", micro_batches,
             "parts of a batch; 0: 4, or 1 in the naive schedule, or 2 per device if interleaved",
             {0, 1024});
  parser.add_flag("--recompute", recompute,
                  "keep only each stage's input and run its forward again before backward: less "
                  "memory, more time");
  parser.begin_group("Output");
  parser.add_flag("--print-schedule", print_schedule,
                  "draw the timetable for these devices and micro-batches, and end");
  parser.is_elsewhere("--tensor-split", "tensor-split", "--layers");
  parser.check_afterwards([this, &parser] {
    require(!print_schedule || !parser.given("--baseline"),
            "--print-schedule: trains nothing that --baseline could measure; leave one of them "
            "out");
  });
}

int PipelineProgramOptions::micro_batch_count(size_t devices) const {
  if (micro_batches > 0) return micro_batches;
  switch (schedule_kind) {
    case ScheduleKind::naive:
      return 1;
    case ScheduleKind::interleaved:
      return 2 * static_cast<int>(devices);  // it needs a multiple
    default:
      return 4;
  }
}

int PipelineProgramOptions::chunk_count() const {
  if (chunks > 0) return chunks;
  return schedule_kind == ScheduleKind::interleaved ? 2 : 1;
}

void PipelineProgramOptions::print_timetable(size_t devices) const {
  print_clean("{}", draw(schedule_kind, static_cast<int>(devices), micro_batch_count(devices),
                         chunk_count()));
}

std::string PipelineProgramOptions::emulation(size_t devices) const {
  return fmt::format("micro:{}", micro_batch_count(devices));
}

Pipeline make_pipeline(Model& model, const PipelineProgramOptions& options, const Dataset& set,
                       const std::vector<Stream>& streams) {
  Layers layers = dynamic_cast<Sequential&>(*model.network).release_layers();
  const int micro_batches = options.micro_batch_count(streams.size()),
            chunks = options.chunk_count();
  make_schedules(options.schedule_kind, static_cast<int>(streams.size()), micro_batches,
                 chunks);  // or refuses
  const Shape micro_batch{std::max<int64_t>(2, options.batch_size / micro_batches), set.height,
                          set.width, set.channels};  // batch normalisation needs two samples
  const int stages = static_cast<int>(streams.size()) * chunks;
  const Cuts cuts = choose_cuts(options.split, layers, stages, micro_batch, streams[0], chunks);
  auto network =
      std::make_unique<StagedNetwork>(std::move(layers), cuts, streams, options.precision);
  Pipeline pipeline(std::move(network), *model.loss, set, options.optimizer_rule(),
                    {options.schedule_kind, micro_batches, options.recompute, options.precision});
  pipeline.require_samples(options.smallest_batch(set.count()));
  return pipeline;
}

}  // namespace lockstep
