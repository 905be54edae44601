#pragma once
// A pipeline: the stages of a split network work at the same time, on different parts of a batch.

#include <deque>
#include <memory>
#include <vector>

#include "03-model-split/pipeline/channel.h"
#include "03-model-split/pipeline/schedule.h"
#include "03-model-split/pipeline/staged_network.h"
#include "common/nn/init.h"
#include "common/nn/loss.h"
#include "common/nn/optimizer.h"
#include "common/training/feeder.h"
#include "common/training/phase_timer.h"
#include "common/training/training_log.h"

namespace lockstep {

struct PipelineOptions {
  ScheduleKind schedule = ScheduleKind::one_f1b;
  int micro_batches = 4;
  /// Keeps only each stage's input and runs its forward once more before its backward (Chen et al.,
  /// arXiv 1604.06174): less memory, a third more work. Dropout draws the same masks again.
  bool recompute = false;
  Precision precision = Precision::real;  // that of the network
};

/// Trains a split network by a schedule. Cuts a batch into micro-batches and adds up their
/// gradients before the one update. So the result is the whole batch's, but batch normalisation
/// sees a micro-batch at a time. A device has as many stages (chunks) as the network says.
class Pipeline {
 public:
  /// `loss` and `set` (which says how images are normalised) must outlive this object.
  Pipeline(std::unique_ptr<StagedNetwork> network, Loss& loss, const Dataset& set,
           const OptimizerRule& rule, const PipelineOptions& options);

  // An optimizer step has these calls. All of them only enqueue.

  /// Gives the step its samples: cuts `batch` into equal micro-batches; the first have a sample
  /// more if the batch does not divide. Throws BadInput if there are more micro-batches than
  /// samples. A stage copies its part of a micro-batch when its instructions come to that
  /// micro-batch. `step.loss_weight` is 1 / (samples of the batch).
  void feed(const HostBatch& batch, const StepState& step);
  /// Does the same with micro-batches of any sizes; there are as many as the options say.
  void feed(const HostBatch& batch, const std::vector<BatchPart>& micro_batches,
            const StepState& step);
  /// Zeroes the gradients of every stage, and the loss on the last stage.
  void zero_gradients();
  /// Every device follows its instructions up to the step: receive, forward, send, backward. Leaves
  /// the batch's mean loss in loss().
  void run_schedule();
  /// Runs every device's last instruction, the step: its optimizers update its parameters.
  void update();

  /// The batch's mean loss [1], on the last stage's device.
  Tensor loss() const { return network_->stages().back().parameters->loss(); }
  /// The health of every stage's optimizer.
  std::vector<HealthTensor> healths() const;

  /// Throws BadInput if a batch of `samples` has fewer samples than there are micro-batches.
  void require_samples(int64_t samples) const;
  /// Sets the first values of all parameters, the same as in stage 01.
  void initialize(Initializer initializer, uint64_t seed);
  /// Writes the rounded copies of all values in 16 bits, where there are any. Call this function
  /// after values have been initialised or loaded.
  void round() const;
  /// The number of learnt values of the whole network.
  int64_t parameter_count() const;
  /// The stages as one network, for evaluation and for its state; its input and result are on
  /// device 0.
  Module& network();

  /// The most activations that each device kept at once, between forward and the end of backward.
  std::vector<int> live() const;
  /// The share of time that devices waited for each other, measured by events in their streams.
  double measured_bubble();
  /// Forgets the devices' times so far.
  void restart_clocks();
  /// Floating-point operations on all devices so far, in training.
  double flops() const;
  /// Bytes of activations, gradients and losses that went from one device to another so far,
  /// counted where their copies are enqueued.
  int64_t bytes_moved() const;
  /// The bytes that had to go, by sizes: all samples' activations and their gradients at every
  /// boundary. Also a loss for every device but the last, in fp16 two numbers more. For tests;
  /// report() adds them to the summary.
  int64_t bytes_predicted() const { return bytes_expected_; }
  /// Adds to the summary and the metrics: the bubble, the devices' phases, the activations that
  /// they keep, and the bytes that move between them.
  void report(TrainingLog& log);

 private:
  /// One micro-batch on one stage, from forward to backward.
  struct InFlight {
    Context context;
    BatchPart part{};
    AnyTensor input{};            // for recomputing
    AnyTensor output{};           // to the next stage
    AnyTensor output_gradient{};  // from the next stage, on the last one from the loss
    AnyTensor input_gradient{};   // to the stage before
  };
  struct Stage {
    const StagedNetwork::Stage& network;
    Optimizer optimizer;
    Feeder feeder;
    std::vector<InFlight> in_flight{};  // micro-batch i uses number i modulo their number
  };
  /// A device, with one stage or several.
  struct Worker {
    PhaseTimer phases;
    std::shared_ptr<TensorPool> pool;  // of its stages' contexts
    OverflowNumber overflow{};         // of its stages' gradients; for fp16
    size_t next = 0;                   // instruction of the current step
    int live = 0, most_live = 0;
  };

  void add_device(size_t device);
  void add_stage(const Dataset& set, const OptimizerRule& rule);
  bool enqueue_as_far_as_possible(size_t device);
  void enqueue(size_t device, const Instruction& instruction);
  bool can_run(size_t stage, const Instruction& instruction) const;
  void run(size_t stage, const Instruction& instruction);
  void send(Channel& channel, AnyTensor& x, PhaseTimer& phases);
  void forward(size_t stage, int micro_batch);
  void expect_boundary(size_t stage, const AnyTensor& activation);
  void backward(size_t stage, int micro_batch);
  void release_gradient(size_t stage);
  bool scales_loss() const { return options_.precision == Precision::fp16; }
  void collect_overflows();
  void share_overflow(size_t device);
  void step(size_t device);
  /// The name of a pass in a trace: "forward 2", or with several chunks "forward 2.1".
  std::string pass_text(const char* pass, size_t stage, int micro_batch) const;
  InFlight& in_flight(size_t stage, int micro_batch);
  size_t stage_of(size_t device, const Instruction& instruction) const {
    return static_cast<size_t>(instruction.chunk) * workers_.size() + device;
  }
  Worker& worker_of(size_t stage) { return workers_[stage % workers_.size()]; }
  bool is_last(size_t stage) const { return stage + 1 == stages_.size(); }

  std::unique_ptr<StagedNetwork> network_;
  Loss& loss_;
  PipelineOptions options_;
  std::vector<Instructions> schedules_;  // of each device, without the last instruction, the step
  std::deque<Worker> workers_;           // one per device
  std::deque<Stage> stages_;
  std::deque<Channel> activations_, gradients_;        // [s]: between stages s and s + 1
  std::deque<Channel> losses_;                         // [d]: from the last device to device d
  std::deque<Channel> overflows_to_last_, overflows_;  // for fp16: [d], and back
  int64_t bytes_expected_ = 0;

  // The current step.
  HostBatch batch_;
  std::vector<BatchPart> micro_batches_;
  StepState step_{};
};

}  // namespace lockstep
