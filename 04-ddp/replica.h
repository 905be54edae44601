#pragma once
// What both ways of writing DDP share: one rank's copy of the network.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "04-ddp/all_reduce.h"
#include "04-ddp/compression.h"
#include "common/nn/module.h"
#include "common/rendezvous/agreement.h"
#include "common/training/phase_timer.h"

namespace lockstep {

/// Where the time of steps went, in seconds per step. Compute is forward, loss and backward;
/// communication is the all-reduces, including the wait for slower ranks; exposed is the part that
/// backward did not hide: the time from the end of backward until the gradients were there,
/// including the handing over between threads.
struct StepTimes {
  double compute = 0, communication = 0, exposed = 0;
  /// The part of communication that did not make the step longer, 0 to 1.
  double hidden() const;
  /// The part of `exposed` that is not communication: the handing over.
  double hand_over() const;
  /// "compute 1.00, communication 0.40 (75 % hidden), ..." in ms. The share is said where it is one
  /// that means something: where reductions `may_overlap` backward, and any of it was hidden. On
  /// cores that are busy with something else, exposed can be longer than the communication itself.
  std::string text(bool may_overlap) const;
};

/// Throws BadInput, on all ranks, if they do not have the same parameters and running statistics.
/// Without this check a difference would show as a sum of unrelated numbers, or as a hang.
void require_same_network(const ExchangeTexts& exchange, const std::vector<Parameter*>& parameters,
                          const std::vector<ModelBuffer*>& buffers);

/// Gives all ranks rank 0's running statistics, each of which has seen its own part of the batches.
class RunningStatistics {
 public:
  /// `values` as FlatBuffers::values(). With `broadcasts` false every rank keeps its own.
  RunningStatistics(Communicator& comm, Stream passes, Stream communication, Tensor values,
                    bool broadcasts)
      : comm_(comm),
        passes_(passes),
        communication_(communication),
        values_(std::move(values)),
        broadcasts_(broadcasts) {}
  /// They become rank 0's, if a pass has changed them. The message goes over the communication
  /// stream: beside messages of another group, on a stream of its own, some ranks might come to it
  /// first and others to those, and all would wait.
  void broadcast_buffers();
  /// A training pass has.
  void mark_changed() { changed_ = true; }

 private:
  Communicator& comm_;
  Stream passes_, communication_;
  Tensor values_;
  bool broadcasts_;
  bool changed_ = true;
};

/// One rank's copy of a network; every rank has its own part of every batch. After backward the
/// gradients are the same on all ranks: those of the whole batch.
///
/// A rank's loss must be the mean over its n_r samples, times n_r W / N: so a sample counts W / N
/// (StepState::loss_weight), and the mean of that over the ranks is the mean over all N samples,
/// however unequal the parts are. A rank without samples makes its passes with an empty batch.
///
/// The loss in FlatParameters::loss() becomes the mean over the global batch as the gradients do.
/// It travels with the last of them: a message of its own would cost more than its four bytes.
class Replica : public Module {
 public:
  /// In training it begins with a broadcast of rank 0's running statistics; evaluation does not
  /// communicate, so that one rank may evaluate alone.
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  /// Running statistics become rank 0's, if a pass has changed them.
  void broadcast_buffers() { running_statistics_.broadcast_buffers(); }

  /// Whether this rank's contribution to the sums was finite, its loss included. When a sum is not
  /// finite, this tells which rank it came from.
  const HealthTensor& own_health() const { return own_health_; }
  /// The module itself: its names and state are those of an unwrapped network.
  Module& inner() { return module_; }
  /// Whoever has sent gradients knows how many bytes (Communicator::bytes_sent()).
  const Communicator& comm() const { return comm_; }
  /// Of the steps so far. Waits for the last one.
  StepTimes times(int64_t steps);
  /// Whether a reduction may begin before backward has ended.
  virtual bool overlaps() const { return false; }
  /// What gradients are sent in.
  Compression compression() const { return compression_; }

 protected:
  /// `parameters` are those of `module`, on the stream of its passes; they and `comm` must outlive
  /// this object.
  Replica(std::unique_ptr<Module> module, const FlatParameters& parameters, Communicator& comm,
          Stream communication, AllReduceKind kind, Compression compression,
          bool broadcast_buffers);

  /// `gradients`, for which the communication stream waits, become their mean over the ranks there:
  /// a part of FlatParameters::contribution(), which may end with the loss and the marks.
  void average_gradients(const Tensor& gradients);
  /// After this, on the stream of the passes, all gradients are averaged.
  void finish_reduction();

  Module& module_;
  const FlatParameters& parameters_;
  Communicator& comm_;
  Stream passes_, communication_;

 private:
  int64_t count_in_16_bits(const Tensor& part) const;

  AllReduce all_reduce_;
  Compression compression_;
  Bf16Messages messages_in_16_bits_;
  RunningStatistics running_statistics_;
  bool in_step_ = false;   // a pass has begun whose reduction has not ended
  StepStateTensor state_;  // of the current pass
  HealthTensor own_health_;
  PhaseTimer pass_times_, communication_times_;
};

}  // namespace lockstep
