#pragma once
// One rank's copy of the network, shared by both ways of writing DDP.

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

/// The parts of a step's time, in seconds per step. Compute is forward, loss and backward.
/// Communication is the all-reduces, including the wait for slower ranks. Exposed is the part that
/// backward did not hide: from the end of backward until the gradients were there, including the
/// handing over between threads.
struct StepTimes {
  double compute = 0, communication = 0, exposed = 0;
  /// The part of communication that did not make the step longer, 0 to 1.
  double hidden() const;
  /// The part of `exposed` that is not communication: the handing over.
  double hand_over() const;
  /// "compute 1.00, communication 0.40 (75 % hidden), ..." in ms. Gives the share only where it has
  /// a meaning: where reductions `may_overlap` backward, and some time was hidden. On cores that
  /// are busy with other work, exposed can be longer than the communication.
  std::string text(bool may_overlap) const;
};

/// Throws BadInput, on all ranks, if the ranks' parameters or running statistics differ. Without
/// this check a difference would show as a sum of unrelated numbers, or as a hang.
void require_same_network(const ExchangeTexts& exchange, const std::vector<Parameter*>& parameters,
                          const std::vector<ModelBuffer*>& buffers);

/// Gives all ranks rank 0's running statistics. Each rank has seen only its part of the batches.
class RunningStatistics {
 public:
  /// `values` are FlatBuffers::values(). If `broadcasts` is false, every rank keeps its own.
  RunningStatistics(Communicator& comm, Stream passes, Stream communication, Tensor values,
                    bool broadcasts)
      : comm_(comm),
        passes_(passes),
        communication_(communication),
        values_(std::move(values)),
        broadcasts_(broadcasts) {}
  /// Gives all ranks rank 0's statistics, if a pass has changed them. The message goes over the
  /// communication stream. On a stream of its own, beside another group's messages, some ranks
  /// might begin with this message and others with those: all would wait.
  void broadcast_buffers();
  /// Notes that a training pass has changed the statistics.
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
/// A rank's loss must be the mean over its n_r samples, times n_r W / N. So a sample counts W / N
/// (StepState::loss_weight). The mean of the ranks' losses is the mean over all N samples, however
/// unequal the parts are. A rank without samples makes its passes with an empty batch.
///
/// The loss in FlatParameters::loss() is averaged over the global batch, as the gradients are. It
/// travels with the last gradients: a message of its own would cost more than its four bytes.
class Replica : public Module {
 public:
  /// In training, broadcasts rank 0's running statistics first. Evaluation does not communicate, so
  /// that one rank may evaluate alone.
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  /// Gives all ranks rank 0's running statistics, if a pass has changed them.
  void broadcast_buffers() { running_statistics_.broadcast_buffers(); }

  /// Whether this rank's contribution to the sums was finite, its loss included. When a sum is not
  /// finite, this tells which rank it came from.
  const HealthTensor& own_health() const { return own_health_; }
  /// The module itself: its names and state are those of an unwrapped network.
  Module& inner() { return module_; }
  /// The communicator of the gradients; its bytes_sent() counts them.
  const Communicator& comm() const { return comm_; }
  /// The times of the steps so far. Waits for the last step.
  StepTimes times(int64_t steps);
  /// Whether a reduction may begin before backward has ended.
  virtual bool overlaps() const { return false; }
  /// How gradients are sent.
  Compression compression() const { return compression_; }

 protected:
  /// `parameters` are those of `module`, on the stream of its passes; they and `comm` must outlive
  /// this object.
  Replica(std::unique_ptr<Module> module, const FlatParameters& parameters, Communicator& comm,
          Stream communication, AllReduceKind kind, Compression compression,
          bool broadcast_buffers);

  /// Replaces `gradients` by their mean over the ranks, on the communication stream, which waited
  /// for them. They are a part of FlatParameters::contribution(), maybe with loss and marks.
  void average_gradients(const Tensor& gradients);
  /// Makes the stream of the passes wait until all gradients are averaged.
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
