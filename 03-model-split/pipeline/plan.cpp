// Prints a pipeline's schedule as a plan, for `lockstep show`.

#include "03-model-split/pipeline/drawing.h"

int main(int argc, char** argv) {
  lockstep::ScheduleKind schedule = lockstep::ScheduleKind::one_f1b;
  int stages = 4, micro_batches = 0, chunks = 0;
  lockstep::OptionParser parser("plan", "Prints a pipeline's schedule as JSON.");
  parser.add("--schedule", schedule, "how micro-batches take turns");
  parser.add("--stages", stages, "stages of the pipeline, or devices of several chunks", {1, 64});
  parser.add("--chunks", chunks, "stages on a device; 0: 2 for interleaved, 1 for the others",
             {0, 16});
  parser.add("--micro-batches", micro_batches,
             "of a batch; 0: 1 for naive, 2 per device for interleaved, 8 for the others",
             {0, 256});
  return lockstep::print_plan(argc, argv, parser, [&] {
    const bool interleaved = schedule == lockstep::ScheduleKind::interleaved;
    const int usual = schedule == lockstep::ScheduleKind::naive ? 1 : interleaved ? 2 * stages : 8;
    return lockstep::plan_of(schedule, stages, micro_batches == 0 ? usual : micro_batches,
                             chunks > 0    ? chunks
                             : interleaved ? 2
                                           : 1);
  });
}
