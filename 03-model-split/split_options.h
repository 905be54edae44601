#pragma once
// This stage's own options, and the training that they ask for.

#include <memory>
#include <string>
#include <vector>

#include "03-model-split/schedule.h"
#include "03-model-split/split_training.h"
#include "common/app/options.h"
#include "common/comm/local_world.h"
#include "common/nn/models.h"

namespace lockstep {

struct SplitOptions {
  std::string split = "auto";
  std::string schedule = "1f1b";
  int micro_batches = 0;  // 0: 4, but 1 for the naive schedule
  bool recompute = false;
  bool print_schedule = false;
  std::vector<std::string> tensor_split;  // "auto", or the layers to be split inside

  /// Adds the options to a program's. Refused where the command line is read: what one way of
  /// splitting has and the other has not.
  void add_to(OptionParser& parser);

  bool inside_layers() const { return !tensor_split.empty(); }
  /// Micro-batches of a batch.
  int parts() const;
  /// The timetable of a pipeline of so many stages, as text.
  std::string timetable(size_t stages) const;
  /// The --emulate with which stage 01 computes the same.
  std::string emulation() const;
};

/// Cuts the model's network as the options say and lays the pieces out, one on each stream, on the
/// devices of `world`. `model`, whose network has no layers afterwards, and `set`, which says how
/// large images are, must outlive the result. Throws BadInput where the network cannot be cut so.
std::unique_ptr<SplitTraining> split_model(Model& model, const Options& options,
                                           const SplitOptions& split, const Dataset& set,
                                           const std::vector<Stream>& streams, LocalWorld& world);

}  // namespace lockstep
