#pragma once
// This stage's own options, and the pipeline that they ask for.

#include <string>
#include <vector>

#include "03-model-split/pipeline/pipeline.h"
#include "common/nn/models.h"
#include "common/options/options.h"

namespace lockstep {

struct PipelineProgramOptions {
  std::string split = "auto";
  std::string schedule = "1f1b";
  int micro_batches = 0;  // 0: 4, but 1 for the naive schedule
  bool recompute = false;
  bool print_schedule = false;

  void add_to(OptionParser& parser);

  /// How many micro-batches a batch has.
  int micro_batch_count() const;
  /// The timetable of a pipeline with this number of stages, as text.
  std::string timetable(size_t stages) const;
  /// The --emulate value with which the reference computes the same.
  std::string emulation() const;
};

/// Cuts the model's network, as the options say, into one stage per stream. `model`, whose network
/// has no layers afterwards, and `set`, which says how large images are, must outlive the result.
/// Throws BadInput where the network cannot be cut in this way.
Pipeline make_pipeline(Model& model, const Options& options, const PipelineProgramOptions& own,
                       const Dataset& set, const std::vector<Stream>& streams);

}  // namespace lockstep
