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

/// Runs a module on the parts of a batch, on several devices at once. Device 0 holds the model.
/// Each other device holds a replica and gets the weights for every pass. Mirrors
/// torch.nn.DataParallel and its costs. Device 0 hands out the samples and weights, gathers the
/// scores, and adds up the gradients. Device 0 needs the memory for all of that.
///
/// The next copy overwrites what a replica has changed in itself. So the running statistics of
/// batch normalisation come from device 0's part alone, as in PyTorch.
class DataParallel final : public Module {
 public:
  using MakeReplica = std::function<std::unique_ptr<Module>()>;

  /// `module` is the model, on streams[0]'s device. `parameters` has its parameters and must
  /// outlive this object. make_replica() makes each replica r > 0, on streams[r]'s device. Throws
  /// BadInput, naming both devices, if the parameters are on another device.
  DataParallel(std::unique_ptr<Module> module, const FlatParameters& parameters,
               const MakeReplica& make_replica, const std::vector<Stream>& streams);

  /// Runs scatter, replicate, parallel_apply and gather. x and the result are on device 0.
  AnyTensor forward(const AnyTensor& x, Context& context) override;
  /// Runs the transposes in reverse order: scatters dy, runs backward on all devices, adds up the
  /// gradients on device 0. Returns no gradient of the input.
  AnyTensor backward(const AnyTensor& dy, Context& context) override;

  /// Times of scatter, replicate, forward, gather, loss (the time between the passes), backward and
  /// reduce, in training.
  PhaseTimer& phases() { return phases_; }
  /// Bytes moved between devices in training so far, as counted where copy() enqueues them, and as
  /// predicted from sizes. Both are for tests; report() adds them to the summary.
  int64_t bytes_moved() const { return bytes_moved_; }
  int64_t bytes_predicted() const { return bytes_expected_; }
  /// Adds times and bytes, per step, to the summary and the metrics.
  void report(TrainingLog& log);
  /// Bytes that a step over a batch must move, computed from sizes alone. Each replica has weights,
  /// running statistics and gradients. There are also `bytes_per_sample` (input, scores, their
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
  /// some devices may get none. Device 0's part is not copied: it is a piece of x.
  std::vector<AnyTensor> scatter(const AnyTensor& x);
  /// Copies the weights, the running statistics and the facts of the pass to all replicas in use.
  /// With a precision of 16 bits each replica then rounds its weights.
  void replicate();
  /// Enqueues every replica's forward: none waits for another.
  std::vector<AnyTensor> parallel_apply(const std::vector<AnyTensor>& inputs);
  /// Joins the rows of all outputs, device 0's too, in the order of the replicas. Returns [N,...]
  /// on device 0, in memory of its context. The outputs have the same shape, but the last one may
  /// have fewer rows. copy() brings an output as soon as its replica has computed it.
  AnyTensor gather(const std::vector<AnyTensor>& outputs);
  void parallel_backward(const std::vector<AnyTensor>& output_gradients);
  /// Adds the gradients of the replicas in use to those that device 0 holds already. copy() brings
  /// a replica's gradients to device 0 as soon as its backward is done; device 0's stream computes
  /// the sum.
  void reduce_add();

  // Device 0's stream makes all copies. This stream may touch the memory of a replica between
  // hand_back() and hand_over().

  /// Makes device 0's stream wait for the work that the replica's stream has been given so
  /// far.
  void hand_back(size_t replica);
  /// Makes the replica's stream wait for the work that device 0's stream has been given so far.
  void hand_over(size_t replica);
  /// Enqueues a copy on device 0's stream; counts the bytes if the devices differ.
  template <class From, class To>
  void copy(const From& from, const To& to);
  void count_bytes(int64_t bytes);
  /// Calls work(replica, its number) for each replica in use; an error names its replica.
  template <class Work>
  void on_each_replica(Work work);
  Replica& root() { return replicas_[0]; }

  PhaseTimer phases_;
  std::vector<Replica> replicas_;  // [0] is the model itself
  size_t in_use_ = 1;              // how many of them the current batch uses
  int64_t bytes_moved_ = 0, bytes_expected_ = 0;
  // The parts of replicas 1, 2, ...
  std::vector<std::unique_ptr<Module>> replica_modules_;
  std::vector<std::unique_ptr<FlatParameters>> replica_parameters_;
  std::vector<std::unique_ptr<Context>> replica_contexts_;
};

}  // namespace lockstep
