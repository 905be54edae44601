#pragma once
// A pipeline whose stages are different ranks. Each rank has some layers in a row, one stage;
// activations go to the next stage's rank, gradients to the one before.

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "03-model-split/pipeline/schedule.h"
#include "07-mesh/device_mesh.h"
#include "common/nn/models.h"
#include "common/training/pass_collectives.h"
#include "common/training/phase_timer.h"

namespace lockstep {

/// The layers of each stage. Every stage has at least one layer with parameters. The stage with the
/// most floating-point operations has as few as possible. `flops` has each layer's operations, by
/// name. Throws BadInput where there are more stages than layers with parameters.
std::vector<Layers> cut_into_stages(Layers layers, const std::map<std::string, double>& flops,
                                    int stages);
/// The operations of each layer of the network that `options` describe, for some samples. The
/// device needs room for one layer only; nothing is sent.
std::map<std::string, double> flops_of_layers(const ModelOptions& options, Stream stream);

/// How many micro-batches a step has, and how they take turns.
struct PipelinePlan {
  ScheduleKind schedule = ScheduleKind::one_f1b;
  int micro_batches = 1;
};

/// Messages between the ranks along `pipeline`, all in one direction. They have a communicator and
/// a stream of their own.
///
/// A tensor that is sent stays until it has arrived; if `most_under_way` tensors stay, the passes
/// wait for the oldest. Tensors that arrive have two places, from which the passes copy them: one
/// can arrive before the passes come to the one before. A copy inside a device takes less time than
/// a message that could only begin when the passes need it.
class StageLink {
 public:
  /// All ranks of `mesh` call this. `mesh` must outlive this object. `name` is the stream's.
  StageLink(DeviceMesh& mesh, Stream passes, const std::string& name, int most_under_way);
  ~StageLink();
  StageLink(const StageLink&) = delete;
  StageLink& operator=(const StageLink&) = delete;

  /// Enqueues the send of x [n,...], as the passes so far have made it, to stage `to`. All tensors
  /// of a link have the same extents but the first.
  void send(const AnyTensor& x, int to, const Context& context);
  /// Returns the next tensor [samples,...] from stage `from`, for later work of the passes, in the
  /// precision of `context`. The host waits for the first tensor, which comes with its extents; all
  /// ranks know `samples`. Throws BadInput if the first tensor has another number of samples.
  AnyTensor receive(int64_t samples, int from, Context& context);
  /// Makes the passes wait until all that was sent has arrived.
  void await_sent(const Context& context);

  /// Bytes that this rank has sent in training, counted where they leave, and by sizes.
  int64_t bytes_sent() const { return comm_->bytes_sent(Purpose::activations); }
  int64_t bytes_by_sizes() const { return bytes_by_sizes_; }
  /// Seconds that training passes have waited for tensors to arrive: incoming ones, and those that
  /// they have sent. Waits for the last one.
  double seconds_waited() { return waits_.total("waited"); }

 private:
  struct UnderWay {
    AnyTensor x;
    Event arrived;
  };
  struct Place {
    AnyTensor memory{};
    std::optional<Event> emptied{};  // of the passes: they have copied what was there
  };

  void await(const Event& arrived, const Context& context);
  void tell_extents(const AnyTensor& x, int to);
  void learn_extents(int64_t samples, int from);

  const DeviceMesh& mesh_;
  std::string name_;
  Stream passes_, stream_;
  std::unique_ptr<Communicator> comm_;
  size_t most_under_way_;
  std::deque<UnderWay> under_way_;  // oldest first
  std::vector<Place> places_;
  size_t received_ = 0;
  BasicTensor<int64_t> told_;  // the extents that were sent
  Shape learnt_;               // and received, [1,...]
  int64_t bytes_by_sizes_ = 0;
  PhaseTimer waits_;  // of the passes
};

/// One rank's stage. The training loop uses it as if it were the whole network. The loop gives each
/// micro-batch to forward(), then the gradient of the scores to backward(). The stage's list of
/// instructions, stage 03's, decides the order of passes. Every call follows the list up to the
/// first pass whose input the loop has not given yet. So a stage may make several forwards before
/// its first backward, though the loop asks for both in turn. After the last backward() the list
/// has ended. Each micro-batch between forward and backward has its own context. A stage's last
/// backward waits for its gradients' reductions over the other axes, then sends its own gradient
/// on. So the reductions are not hidden behind the work of the stages before it.
///
/// Why no rank waits forever: in stage 03's simulate() all lists end, even if a send lasts until
/// its receiver has come to the receive. There every operation has a time. A rank's passes, sends
/// and receives have the times of its instructions. Collectives within a pass have the time of the
/// pass, which is the same on all ranks of a stage. The sum of the losses comes last: after the
/// last gradient has arrived, or it might take that message's place on the GPU. Here an operation
/// waits only for operations with an earlier time. They are some of those before it in its rank's
/// list, and the other side of its message. So some operation can always go on, even if a call
/// keeps the host until that side has come (NCCL, when it connects two ranks). The links have
/// streams of their own. Otherwise an activation would wait for a gradient that the list sends
/// before it, though nobody needs that order.
class RankPipeline final : public Module {
 public:
  /// `stage` has this rank's layers; `classes` is the number of scores. `loss` [1] is a step's loss
  /// as far as the stage knows it: 0 on all stages but the last. After the last backward, `loss` is
  /// the sum over all stages.
  RankPipeline(std::unique_ptr<Module> stage, DeviceMesh& mesh, Stream passes, Stream communication,
               const PipelinePlan& plan, int64_t classes, const Tensor& loss);

  /// In training the last stage returns scores, the others an undefined tensor. In evaluation all
  /// stages return the last one's scores.
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  /// `dy` is undefined on all stages but the last. Returns an undefined tensor.
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ + 1 == calls_.comm().world_size(); }
  const StageLink& activations() const { return activations_; }
  const StageLink& gradients() const { return gradients_; }
  /// Seconds that this rank's training passes have waited for other stages. Waits for the last one.
  double seconds_waited();

 private:
  /// One micro-batch from its receive to the send of its gradient.
  struct InFlight {
    Context context;
    int64_t samples = 0;
    AnyTensor input{}, output{}, output_gradient{}, input_gradient{};
  };

  Module& layers() const { return *children().front(); }
  bool can_run(const Instruction& instruction) const;
  void follow(Context& context);
  void run(const Instruction& instruction);
  AnyTensor evaluate(const AnyTensor& x, Context& context);
  void end_step(Context& context);

  int stage_;
  PassCollectives calls_;  // along `pipeline`
  Instructions list_;      // without the last one, the optimizer's step
  StageLink activations_, gradients_;
  int64_t classes_;
  Tensor loss_;

  // The current step.
  size_t next_ = 0;                               // instruction
  int forwards_given_ = 0, backwards_given_ = 0;  // micro-batches, by the training loop
  std::map<int, InFlight> in_flight_;             // by micro-batch
};

/// Makes the model's network, which has this rank's layers, a stage of the pipeline. The loss
/// becomes the pipeline's: in training only the last stage has one. Parameters as RankPipeline's.
RankPipeline& make_stage(Model& model, DeviceMesh& mesh, Stream passes, Stream communication,
                         const PipelinePlan& plan, int64_t classes, const Tensor& loss);

}  // namespace lockstep
