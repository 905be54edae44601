#pragma once
// This program's own options, and the pipeline that they ask for.

#include <string>
#include <vector>

#include "03-model-split/pipeline/pipeline.h"
#include "common/nn/models.h"
#include "common/options/options.h"

namespace lockstep {

struct PipelineProgramOptions : Options {
  std::string split = "auto";
  ScheduleKind schedule_kind = ScheduleKind::one_f1b;
  int micro_batches = 0;  // 0: 4, but 1 for the naive schedule, 2 per device for interleaved
  int chunks = 0;         // 0: 2 for interleaved, 1 for the others
  bool recompute = false;
  bool print_schedule = false;

  void add_to(OptionParser& parser) override;

  /// How many micro-batches a batch has.
  int micro_batch_count(size_t devices) const;
  /// How many stages a device has.
  int chunk_count() const;
  /// Prints the timetable of a pipeline with this number of devices.
  void print_timetable(size_t devices) const;
  /// The --emulate value with which the reference computes the same.
  std::string emulation(size_t devices) const;
};

/// Cuts the model's network, as the options say, into a stage per chunk of every stream.
/// The network has no layers afterwards. `set` says how large images are. `model` and
/// `set` must outlive the result. Throws BadInput where the network cannot be cut in this
/// way.
Pipeline make_pipeline(Model& model, const PipelineProgramOptions& options, const Dataset& set,
                       const std::vector<Stream>& streams);

}  // namespace lockstep
