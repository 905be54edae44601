#pragma once
// Collectives: what the ranks of a group do together. A rank is one member, with a device; its
// Communicator is its membership.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/core/tensor.h"
#include "common/kernels/rank_sum.h"

namespace lockstep {

enum class Reduction { sum, average };

/// `count` numbers in device memory, as a collective sees them. Made from a tensor, whose device it
/// keeps; null for memory that is no tensor's.
struct Elements {
  void* data = nullptr;
  int64_t count = 0;
  ElementType type = ElementType::f32;
  const Device* device = nullptr;

  Elements() = default;
  Elements(void* data, int64_t count, ElementType type, const Device* device = nullptr)
      : data(data), count(count), type(type), device(device) {}
  Elements(const BasicTensor<float>& x)
      : Elements(x.data(), x.elements(), ElementType::f32, &x.home().device()) {}
  Elements(const BasicTensor<double>& x)
      : Elements(x.data(), x.elements(), ElementType::f64, &x.home().device()) {}
  Elements(const BasicTensor<int64_t>& x)
      : Elements(x.data(), x.elements(), ElementType::i64, &x.home().device()) {}

  /// `count` elements from element `first` on.
  Elements part(int64_t first, int64_t count) const;
};

/// Bytes of one element.
int64_t size_of(ElementType type);

/// One call of one rank.
struct Call {
  enum class Op {
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    reduce,
    gather,
    scatter,
    send,
    receive,
    barrier
  };
  Op op = Op::barrier;
  Elements mine{};  // the rank's own share, or what is sent, received, reduced or broadcast
  Elements all{};   // of all ranks, W times mine; where only the root uses it, empty elsewhere
  int peer = 0;     // root, or the other side of send and receive
  Reduction reduction = Reduction::sum;
  std::string label{};  // whom it is for, "bn1"; may be empty

  /// What must be the same on all ranks: "all_reduce of 87360 f32, sum", "broadcast of 10 i64, root
  /// 0", "all_gather of 21 f32 for bn1".
  std::string text() const;
};

/// "all_reduce", "broadcast", ...
const char* name_of(Call::Op op);

/// One rank's membership of a group of `world_size` ranks. Every call is enqueued on the given
/// stream of the rank's device and returns at once. All ranks make the same calls in the same
/// order. Counts are elements, never bytes, and may be 0. Throws BadInput for arguments that cannot
/// be right. Mirrors torch.distributed and NCCL.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// "rank 1"; in a group of some of a job's ranks, which are numbered anew there: "rank 1 of ranks
  /// 2, 3".
  std::string who() const;

  /// x becomes the sum, or average, of all ranks' x.
  void all_reduce(Stream stream, const Elements& x, Reduction reduction = Reduction::sum);
  /// x becomes the root's x.
  void broadcast(Stream stream, const Elements& x, int root);
  /// all [W n] becomes the mine [n] of rank 0, rank 1, ...
  void all_gather(Stream stream, const Elements& mine, const Elements& all);
  /// mine [n] of rank r becomes the sum, or average, of part r of all ranks' all [W n].
  void reduce_scatter(Stream stream, const Elements& all, const Elements& mine,
                      Reduction reduction = Reduction::sum);
  /// The root's x becomes the sum, or average, of all ranks' x; the others' x stays.
  void reduce(Stream stream, const Elements& x, int root, Reduction reduction = Reduction::sum);
  /// The root's all [W n] becomes the mine [n] of rank 0, rank 1, ...; other ranks give no `all`.
  void gather(Stream stream, const Elements& mine, const Elements& all, int root);
  /// mine [n] of rank r becomes part r of the root's all [W n]; other ranks give no `all`.
  void scatter(Stream stream, const Elements& all, const Elements& mine, int root);
  void send(Stream stream, const Elements& x, int to);
  void receive(Stream stream, const Elements& x, int from);
  /// What is enqueued after it starts when all ranks have reached it.
  void barrier(Stream stream);

  /// Calls between these two are enqueued by the second one, in their order. Sends and receives
  /// that follow each other on a stream then run at the same time: only then can every rank send
  /// before it receives (ncclGroupStart, ncclGroupEnd). Where one host thread calls for all ranks
  /// of a process, CollectiveGroup groups the calls of all, and these two throw BadInput.
  virtual void open_group();
  virtual void close_group();

  /// Whom the calls are for from now on (CallLabel). Returns whom they were for.
  std::string replace_label(std::string label) { return std::exchange(label_, std::move(label)); }
  /// Which of the job's ranks this group has: for errors.
  void set_members(std::string members) { members_ = std::move(members); }

 protected:
  Communicator(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  virtual void issue(Stream stream, const Call& call) = 0;

 private:
  void check(const Call& call) const;
  void check_devices(Stream stream, const Call& call) const;
  void check_and_issue(Stream stream, Call call);

  int rank_, world_size_;
  std::string label_, members_;
};

/// While it lives, the rank's calls are for `label`, for example a layer: errors then name it.
class CallLabel {
 public:
  CallLabel(Communicator& rank, std::string label)
      : rank_(rank), before_(rank.replace_label(std::move(label))) {}
  ~CallLabel() { rank_.replace_label(std::move(before_)); }
  CallLabel(const CallLabel&) = delete;
  CallLabel& operator=(const CallLabel&) = delete;

 private:
  Communicator& rank_;
  std::string before_;
};

}  // namespace lockstep
