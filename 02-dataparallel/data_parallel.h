#pragma once
// DataParallel: one process, one model, many devices.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/core/device.h"
#include "common/nn/module.h"
#include "common/training/phase_timer.h"
#include "common/training/training_log.h"

namespace lockstep {

/// Runs a module on the parts of a batch, on several devices at once. Device 0 holds the model; the
/// others hold replicas, into which its weights are copied for every pass. Mirrors
/// torch.nn.DataParallel, costs included: device 0 hands out the samples and weights, gathers the
/// scores, adds up the gradients, and has the memory for all of that.
///
/// Whatever a replica changes in itself is lost with the next copy: the running statistics of batch
/// normalisation are those of device 0's part, as in PyTorch.
class DataParallel final : public Module {
 public:
  using MakeReplica = std::function<std::unique_ptr<Module>()>;

  /// `module` is the model, on streams[0]'s device with its parameters in `parameters`, which must
  /// outlive this object. make_replica() makes each replica r > 0, on streams[r]'s device. Throws
  /// BadInput, naming both devices, if the parameters are elsewhere.
  DataParallel(std::unique_ptr<Module> module, const FlatParameters& parameters,
               const MakeReplica& make_replica, const std::vector<Stream>& streams);

  /// scatter, replicate, parallel_apply, gather. x and the result are on device 0.
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  /// The transposes in reverse order: dy is scattered, backward runs on all devices, the gradients
  /// are added up on device 0. Returns no gradient of the input.
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

  /// Times of scatter, replicate, forward, gather, loss (the time between the passes), backward and
  /// reduce, in training.
  PhaseTimer& phases() { return phases_; }
  /// Bytes moved from one device to another in training so far, counted where the copies are
  /// enqueued (copy()), and the bytes that had to be moved. For tests: report() says both.
  int64_t bytes_moved() const { return bytes_moved_; }
  int64_t bytes_predicted() const { return bytes_expected_; }
  /// Adds times and bytes, per step, to the summary and the metrics.
  void report(TrainingLog& log);
  /// Bytes that a step over a batch must move, computed from sizes alone: the weights, running
  /// statistics and gradients of each replica, and `bytes_per_sample` (input, scores, their
  /// gradients) for every sample that is not device 0's.
  int64_t predicted_bytes(int64_t batch_size, int64_t bytes_per_sample) const;

 private:
  struct Replica {
    Stream stream;
    Module* module;
    const FlatParameters* parameters;
    Context* context;  // device 0's is the caller's
  };

  // The phases. Inputs, outputs and output_gradients are lists with one tensor per replica in use,
  // each on its replica's device.

  /// Divides the rows of x [N,...] as torch.chunk does: ceil(N/D) rows each, until none is left. So
  /// not all devices may be in use. Device 0's part is not copied: it is a piece of x.
  std::vector<AnyTensor> scatter(const AnyTensor& x);
  /// Copies the weights, the running statistics and the facts of the pass to all replicas in use.
  /// With a precision of 16 bits each then rounds its weights.
  void replicate();
  /// Enqueues every replica's forward: none waits for another.
  std::vector<AnyTensor> parallel_apply(const std::vector<AnyTensor>& inputs);
  /// Puts the rows of all outputs, device 0's too, one after another in the order of the replicas:
  /// [N,...] on device 0, from its context's memory. The outputs have the same shape, but the last
  /// one may have fewer rows. They arrive by copy(), as soon as their replica has computed them.
  AnyTensor gather(const std::vector<AnyTensor>& outputs);
  void parallel_backward(const std::vector<AnyTensor>& output_gradients);
  /// Adds the gradients of the replicas in use to device 0's, whatever these held before: each
  /// arrives by copy() in memory of device 0, as soon as its replica's backward is done, and device
  /// 0's stream computes the sum.
  void reduce_add();

  // Device 0's stream makes all copies. Between hand_back() and hand_over() it may touch the memory
  // of a replica.

  /// From here on device 0's stream waits for the work that the replica's stream has been given so
  /// far.
  void hand_back(size_t replica);
  /// The other way round.
  void hand_over(size_t replica);
  /// On device 0's stream; counts the bytes if the devices differ.
  template <class From, class To>
  void copy(const From& from, const To& to);
  void count_bytes(int64_t bytes);
  /// Calls work(replica, its number) for those in use; an error says which replica it came from.
  template <class Work>
  void on_each_replica(Work work);
  Replica& root() { return replicas_[0]; }

  PhaseTimer phases_;
  std::vector<Replica> replicas_;  // [0] is the model itself
  size_t in_use_ = 1;              // how many of them the current batch uses
  int64_t bytes_moved_ = 0, bytes_expected_ = 0;
  // What replicas 1, 2, ... consist of.
  std::vector<std::unique_ptr<Module>> replica_modules_;
  std::vector<std::unique_ptr<FlatParameters>> replica_parameters_;
  std::vector<std::unique_ptr<Context>> replica_contexts_;
};

}  // namespace lockstep
