#pragma once
// Collectives: what the ranks of a group do together. A rank is one member, with a device; its
// Communicator is its membership.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/comm/call.h"

namespace lockstep {

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

  /// Bytes of such calls that this rank has given to others so far, counted where they leave. Only
  /// calls that have run are in it: synchronize their streams first. See sent_bytes.h.
  int64_t bytes_sent(Purpose purpose) const { return sent_->of(purpose); }
  int64_t bytes_sent() const { return sent_->of_all(); }
  /// Where they are counted: "shm", "its calls to NCCL", ...
  const std::string& bytes_counted_in() const { return sent_->where(); }

  /// What the calls are for from now on (CallPurpose). Returns what they were for.
  Purpose replace_purpose(Purpose purpose) { return std::exchange(purpose_, purpose); }
  /// Whom the calls are for from now on (CallLabel). Returns whom they were for.
  std::string replace_label(std::string label) { return std::exchange(label_, std::move(label)); }
  /// Which of the job's ranks this group has: for errors.
  void set_members(std::string members) { members_ = std::move(members); }

 protected:
  Communicator(int rank, int world_size,
               std::shared_ptr<SentBytes> sent = std::make_shared<SentBytes>("nothing"))
      : rank_(rank), world_size_(world_size), sent_(std::move(sent)) {}
  const std::shared_ptr<SentBytes>& sent() const { return sent_; }
  virtual void issue(Stream stream, const Call& call) = 0;

 private:
  void check(const Call& call) const;
  void check_devices(Stream stream, const Call& call) const;
  void check_and_issue(Stream stream, Call call);

  int rank_, world_size_;
  std::shared_ptr<SentBytes> sent_;
  Purpose purpose_ = Purpose::other;
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

/// While it lives, the rank's calls are for `purpose`: their bytes are counted under that.
class CallPurpose {
 public:
  CallPurpose(Communicator& rank, Purpose purpose)
      : rank_(rank), before_(rank.replace_purpose(purpose)) {}
  ~CallPurpose() { rank_.replace_purpose(before_); }
  CallPurpose(const CallPurpose&) = delete;
  CallPurpose& operator=(const CallPurpose&) = delete;

 private:
  Communicator& rank_;
  Purpose before_;
};

}  // namespace lockstep
