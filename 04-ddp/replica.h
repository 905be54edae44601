#pragma once
// What both ways of writing DDP share: one rank's copy of the network.

#include <memory>

#include "04-ddp/all_reduce.h"
#include "common/nn/module.h"
#include "common/step/phase_timer.h"

namespace lockstep {

/// Where the time of steps went, in seconds per step. Compute is forward, loss and backward;
/// communication the all-reduces, with the waiting for slower ranks; exposed is what the backward
/// did not hide of it: the time from the end of backward until the gradients were there, with the
/// handing over between threads.
struct StepTimes {
  double compute = 0, communication = 0, exposed = 0;
  /// The part of communication that took no time of the step, 0 to 1.
  double hidden() const;
  /// What of `exposed` is no communication: the handing over.
  double hand_over() const;
};

/// A network of which every rank has a copy, with its own part of every batch. After its backward
/// the gradients are the same on all ranks: those of the whole batch.
///
/// A rank's loss is to be the mean over its n_r samples, times n_r W / N: so a sample counts W / N
/// (StepState::loss_weight), and the mean of that over the ranks is the mean over all N samples,
/// however unequal the parts are. A rank without samples makes its passes with an empty batch.
///
/// The loss in FlatParameters::loss() becomes the mean over the global batch as the gradients do,
/// with the last of which it travels: a message of its own would cost more than its four bytes.
class Replica : public Module {
 public:
  /// In training begins with a broadcast of rank 0's running statistics; evaluation does not
  /// communicate, so that one rank may evaluate alone.
  Tensor forward(const Tensor& x, Context& context) override;
  /// Running statistics become rank 0's, where a pass has changed them.
  void broadcast_buffers();

  /// Whether what this rank gave to the sums was finite, its loss included. Where a sum is not,
  /// this says who it came from.
  const HealthTensor& own_health() const { return own_health_; }
  /// The module itself: its names and state are those of an unwrapped network.
  Module& inner() { return module_; }
  /// For gradients, by this rank, so far.
  int64_t bytes_sent() const { return all_reduce_.bytes_sent(); }
  /// Of the steps so far. Waits for the last one.
  StepTimes times(int64_t steps);

 protected:
  /// `parameters` are those of `module`, on the stream of its passes; they and `ranks` must outlive
  /// this.
  Replica(std::unique_ptr<Module> module, const FlatParameters& parameters, Communicator& ranks,
          Stream communication, AllReduceKind kind, bool broadcast_buffers);

  /// Gradients for which the communication stream waits become their mean over the ranks there.
  void average_gradients(const Tensor& gradients);
  /// Behind this, on the stream of the passes, the gradients are all averaged.
  void finish_reduction();

  Module& module_;
  const FlatParameters& parameters_;
  Communicator& ranks_;
  Stream passes_, communication_;

 private:
  AllReduce all_reduce_;
  bool broadcasts_buffers_;
  bool buffers_are_old_ = true;  // since the last reduction
  bool in_step_ = false;         // a pass has begun whose reduction has not ended
  StepStateTensor state_;        // of the pass at hand
  HealthTensor own_health_;
  PhaseTimer pass_times_, communication_times_;
};

}  // namespace lockstep
