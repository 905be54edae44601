#pragma once
// A pipeline: the stages of a split network work at the same time, on different parts of a batch.

#include <deque>
#include <memory>
#include <vector>

#include "03-model-split/channel.h"
#include "03-model-split/layer_split.h"
#include "03-model-split/schedule.h"
#include "03-model-split/split_training.h"
#include "common/app/feeder.h"
#include "common/app/phase_timer.h"
#include "common/app/training_log.h"
#include "common/nn/loss.h"
#include "common/nn/sgd.h"

namespace lockstep {

struct PipelineOptions {
  ScheduleKind schedule = ScheduleKind::one_f1b;
  int micro_batches = 4;
  /// Keeps only each stage's input and runs its forward once more before its backward (Chen et al.,
  /// arXiv 1604.06174): less memory, a third more work. Dropout draws the same masks again.
  bool recompute = false;
};

/// Trains a split network by a schedule. The batch is cut into micro-batches whose gradients add up
/// before the one update, so the result is that of the whole batch, except for batch normalisation,
/// which sees a micro-batch at a time.
class Pipeline final : public SplitTraining {
 public:
  /// `loss` and `set` (which says how images are normalised) must outlive this.
  Pipeline(std::unique_ptr<LayerSplit> split, Loss& loss, const Dataset& set, const SgdRule& rule,
           const PipelineOptions& options);

  /// Enqueues one optimizer step. Cuts the batch into equal micro-batches, the first ones a sample
  /// larger where it does not divide; throws BadInput if there are more micro-batches than samples.
  /// `step.loss_weight` is 1 / (samples of the batch); the batch's mean loss goes into `mean_loss`
  /// [1], on the last stage's device.
  void train_step(HostBatch batch, const StepState& step, const Tensor& mean_loss) override;
  /// The same with micro-batches of any sizes, as many as the options say.
  void train_step(HostBatch batch, const std::vector<BatchPart>& parts, const StepState& step,
                  const Tensor& mean_loss);

  /// Throws BadInput if a batch of `samples` would be fewer than there are micro-batches.
  void require_samples(int64_t samples) const;
  void initialize(Initializer initializer, uint64_t seed) override;
  std::vector<StateTensor> state() override { return state_dict(*split_); }
  void load_state(const std::vector<StateTensor>& state) override {
    load_state_dict(*split_, state);
  }
  int64_t parameter_count() override;
  Module& network() override;
  /// The last stage's.
  Stream loss_stream() const override { return split_->stages().back().stream; }
  std::vector<HealthTensor> healths() const override;
  /// Most micro-batches between forward and the end of backward, per stage.
  std::vector<int> live() const;
  /// Share of the stages' time in which they waited for each other, by events in their streams.
  double measured_bubble();
  /// Forgets the stages' times so far.
  void restart_clocks();
  double flops() const override;
  /// Adds the bubble, the stages' phases, and what they keep, to the summary and the metrics.
  void report(TrainingLog& log) override;

 private:
  /// One micro-batch on one stage, from forward to backward.
  struct Flight {
    Context context;
    BatchPart part{};
    Tensor input{};            // for recomputing
    Tensor output{};           // to the next stage
    Tensor output_gradient{};  // from the next stage, on the last one from the loss
    Tensor input_gradient{};   // to the stage before
  };
  struct Worker {
    const LayerSplit::Stage& stage;
    Sgd optimizer;
    Feeder feeder;
    PhaseTimer phases;
    std::vector<Flight> flights{};  // micro-batch i uses number i modulo their number
    size_t next = 0;                // instruction of the step at hand
    int live = 0, most_live = 0;
  };

  bool enqueue_as_far_as_possible(size_t stage);
  bool can_run(size_t stage, const Instruction& instruction) const;
  void run(size_t stage, const Instruction& instruction);
  void send(Channel& channel, Tensor& x, PhaseTimer& phases);
  void begin_step();
  void forward(size_t stage, int micro_batch);
  void backward(size_t stage, int micro_batch);
  void update(size_t stage);
  Flight& flight(size_t stage, int micro_batch);
  bool is_last(size_t stage) const { return stage + 1 == workers_.size(); }

  std::unique_ptr<LayerSplit> split_;
  Loss& loss_;
  PipelineOptions options_;
  std::vector<Instructions> schedules_;
  std::deque<Worker> workers_;
  std::deque<Channel> activations_, gradients_;  // [s]: between stages s and s + 1
  std::deque<Channel> losses_;                   // [s]: from the last stage to stage s

  // The step at hand.
  HostBatch batch_;
  std::vector<BatchPart> parts_;
  StepState step_{};
  Tensor mean_loss_;
};

}  // namespace lockstep
