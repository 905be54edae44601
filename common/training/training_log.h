#pragma once
// The output and the records of a run: log lines, progress bar, summary, --metrics.

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "common/comm/process_group.h"
#include "common/options/options.h"
#include "common/training/core_watch.h"
#include "common/training/evaluate.h"
#include "common/training/step_reports.h"

namespace lockstep {

/// The ranks of a run of several processes: one rank reports what happens on all.
struct LogPeers {
  static LogPeers of(ProcessGroup& group, const HealthTensor& own_health);

  int rank = 0;
  ExchangeTexts exchange{};   // empty: one process
  HealthTensor own_health{};  // of what this rank adds to sums over all ranks
  /// ProcessGroup::together(); empty: the work of one process.
  std::function<void(const std::function<void()>& work)> together{};
  /// FlightRecorder::seconds_in_collectives()
  std::function<double()> in_collectives{};
  int alike = 1;        // ranks for which this one stands
  std::string place{};  // ProcessGroup::place()
};

/// Bytes that rank 0 sends in a step, as counted, beside their formula.
struct SentPerStep {
  std::string what;  // "gradients"
  double bytes;
  std::string counted_in;  // Communicator::bytes_counted_in()
  std::string formula;     // "2(W-1)/W times the model is"
  double predicted;        // by it

  std::string text() const;
};

/// The last line of a terminal while an epoch runs: "[=====     ]  50% 12345 samples/s". Nothing
/// where stdout is not a terminal.
class ProgressBar {
 public:
  /// `samples`: the number in an epoch; without `wanted` nothing is ever shown.
  ProgressBar(int64_t samples, bool wanted);

  /// Shows that so many samples of the epoch took so many seconds. Draws only what has changed.
  void show(int64_t samples_done, double seconds);
  /// Erases the bar, so that another line can be printed.
  void clear();

 private:
  int64_t samples_;
  bool terminal_;
  int shown_percent_ = -1;
};

/// Follows a training run. Prints lines as PyTorch's MNIST example does:
///   Train Epoch: 1 [640/60000 (1%)]	Loss: 2.293600
///   Test set: Average loss: 0.5123, Accuracy: 8123/10000 (81.2%)
/// and, where stdout is a terminal, a progress bar below them. Watches over the health of the run.
/// With several ranks, rank 0 prints and writes --metrics for all; --trace writes a file per rank,
/// FILE, FILE.rank1, ...
class TrainingLog {
 public:
  /// `stream` is where the losses arrive, `devices` all that this process uses, `samples` the size
  /// of the training set.
  TrainingLog(std::string program, const Options& options, Stream stream,
              std::vector<Device*> devices, int64_t samples, LogPeers peers = {});
  ~TrainingLog();
  TrainingLog(const TrainingLog&) = delete;
  TrainingLog& operator=(const TrainingLog&) = delete;

  /// Prints the data set, the network with its number of parameters, the devices and their engine,
  /// and `line`.
  void start(const Dataset& train, const Dataset& test, int64_t parameters,
             const std::string& line = "");

  /// Prints a line.
  void say(const std::string& line) const;

  /// For a run that continues: sets the steps and whole epochs that came before. Says so if there
  /// is nothing left to train.
  void resume(int64_t steps, int64_t epochs);
  /// Begins an epoch at its batch `first_batch`.
  void begin_epoch(int64_t epoch, int64_t first_batch = 0);
  /// Call it when the work of one step over `batch`, of all ranks, has been enqueued. Throws
  /// NonFinite, one step late, when a loss or gradient was not finite. `healths` are those of all
  /// optimizers.
  void step(const HostBatch& batch, const Tensor& loss, const std::vector<HealthTensor>& healths);
  /// Waits for the steps so far. Throws as step() does.
  void settle() { receive(0); }
  /// Waits for the epoch's last step and takes the time of the epoch.
  void end_epoch();
  /// After --max-steps steps there is nothing more to train.
  bool finished() const { return options_.max_steps > 0 && steps_ >= options_.max_steps; }
  int64_t steps() const { return steps_; }
  /// The steps of this run, without those of resume().
  int64_t own_steps() const { return steps_ - earlier_steps_; }

  void evaluated(const Evaluation& evaluation);
  bool has_evaluation() const { return !evaluations_.empty(); }
  /// The accuracy of the last evaluation; 0 if nothing is computed.
  double accuracy() const { return simulated() ? 0 : evaluations_.back().accuracy(); }

  /// Adds a row to the summary, for what a stage itself has measured.
  void note(std::string row, std::string text);
  /// The same, and adds `value` to --metrics under `key`.
  void note(std::string row, std::string text, const std::string& key, const nlohmann::json& value);
  /// For stages that copy from device to device. Notes the bytes moved so far, counted where the
  /// copies are enqueued, beside the bytes that had to be moved.
  void note_copies(int64_t moved, int64_t by_sizes);
  /// For stages of ranks that send in every step: notes the bytes that were sent.
  void note_sent(const SentPerStep& sent);
  /// Prints the summary and writes --metrics and --trace. `flops` are this process's.
  void finish(double flops);

 private:
  struct Line {
    int64_t samples_before;
    bool print;
  };

  /// The summary's figures of a device of any rank.
  struct DeviceRecord {
    std::string name;
    int64_t peak_bytes;         // while training
    int64_t workspace_bytes;    // of that, of a CPU's libraries
    double share_without_core;  // of the time while training
  };

  bool prints() const { return peers_.rank == 0; }
  /// Whether nothing is computed: then there are times, and no losses.
  bool simulated() const { return !devices_.front()->computes(); }
  double seconds_of_epoch() const;
  std::vector<nlohmann::json> exchange(const nlohmann::json& mine) const;
  void receive(size_t keep);
  std::string name() const;
  std::string who_failed() const;
  void collect_records(double flops);
  void together(const std::function<void()>& work) const;
  /// Writes the files of --trace and --metrics.
  void write_files() const;
  nlohmann::json metrics() const;
  void note_precision();
  void print_summary() const;
  double samples_per_second() const;
  int64_t training_peak(size_t device) const;
  double in_collectives() const { return peers_.in_collectives ? peers_.in_collectives() : 0; }
  std::vector<double> lateness() const;

  std::string program_;
  const Options& options_;
  std::vector<Device*> devices_;
  LogPeers peers_;
  CoreWatch cores_;
  std::vector<int64_t> training_peaks_;  // bytes, per device, over the epochs so far
  std::vector<int64_t> workspaces_;      // likewise, of the last one
  std::vector<DeviceRecord> records_;    // of all ranks' devices; filled by finish()
  double flops_ = 0;                     // of all ranks
  int64_t rss_bytes_ = 0;                // of the largest process
  std::vector<double> waited_;           // s in collectives while training, of all ranks
  int64_t samples_;
  ProgressBar progress_;
  StepReports reports_;
  std::deque<Line> lines_;  // of the outstanding reports

  int64_t epoch_ = 0, steps_ = 0, earlier_steps_ = 0;
  int64_t samples_seen_ = 0;     // of the epoch
  int64_t samples_trained_ = 0;  // by this run
  int64_t epoch_begin_ns_ = 0;
  double startup_seconds_ = 0, waited_begin_ = 0, waited_here_ = 0;
  std::vector<double> losses_, step_seconds_, epoch_seconds_;
  Health health_;                       // after the last step that has been reported
  std::vector<int64_t> skipped_steps_;  // of fp16
  std::vector<Evaluation> evaluations_;
  std::vector<std::pair<std::string, std::string>> notes_;  // rows of the summary
  std::unique_ptr<nlohmann::json> noted_;                   // for --metrics
};

/// How far a count is from its formula: "+0.1 %". A message too many, or too few, shows here.
std::string beside_formula(double counted, double formula);

}  // namespace lockstep
