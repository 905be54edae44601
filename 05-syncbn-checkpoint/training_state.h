#pragma once
// The state of a training run besides its tensors: enough to resume as if it had never stopped.

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/io/json.h"

namespace lockstep {

/// The numbers of a run between two steps. Dropout draws from counters (seed, step, position in the
/// global batch), so its random state is the step. Likewise the order of an epoch follows from seed
/// and epoch.
struct TrainingState {
  /// The version of the format. A file with another version is refused.
  static constexpr int64_t kFormatVersion = 1;

  int64_t epoch = 0;          // the current one, from 0
  int64_t step_in_epoch = 0;  // its batches so far; if those are all, its evaluation comes next
  int64_t steps = 0;          // optimizer steps so far
  double learning_rate = 0;   // of the next step; follows from the settings
  double best_accuracy = 0;   // of the evaluations so far, 0 to 1
  int64_t world_size = 1;
  /// The number of parts into which the ranks divide a batch, where some have the same samples
  /// (stage 07). 0: every rank has its own.
  int64_t sample_parts = 0;
  // Of --precision fp16 (Health in kernels/step_state.h); with a scale of 0 there is none.
  double loss_scale = 0;
  int64_t good_steps = 0, skipped_steps = 0;
  /// All other settings that the numbers depend on: training_settings(). Names and plain values.
  nlohmann::json settings = nlohmann::json::object();

  /// The batch, from 0, at which `epoch` (this one or a later one) begins in a run that goes on
  /// from here. So no batch is trained on twice, and none is left out. If only the epoch's
  /// evaluation is missing, returns the number of its batches (ShardLoader::begin_epoch).
  int64_t first_batch(int64_t epoch) const;

  /// Counts a step that is done; `next_rate` is the learning rate of the next step.
  void count_step(double next_rate) {
    ++steps;
    ++step_in_epoch;
    learning_rate = next_rate;
  }
  /// Counts an epoch that is over and evaluated.
  void count_epoch(double accuracy) {
    ++epoch;
    step_in_epoch = 0;
    best_accuracy = std::max(best_accuracy, accuracy);
  }

  /// The number of parts of a batch, also where every rank has its own.
  int64_t parts_of_batch() const { return sample_parts > 0 ? sample_parts : world_size; }

  /// One line of JSON, for from_json().
  std::string to_json() const;
  /// Throws BadInput, naming `what`, for text that is not exactly what to_json() makes. Causes: a
  /// newer format version (both are named), a field that is missing, unknown, or of another type.
  static TrainingState from_json(const std::string& text, const std::string& what);

  friend bool operator==(const TrainingState&, const TrainingState&) = default;
};

}  // namespace lockstep
