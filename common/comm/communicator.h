#pragma once
// Collectives: what the ranks of a group do together. A rank is one process of several that train
// together; its Communicator is its membership of a group of them.

#include <fmt/core.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/core/any_tensor.h"
#include "common/system/flight_recorder.h"

namespace lockstep {

// --- A call --------------------------------------------------------------------------------------

enum class Reduction { sum, average };

/// The purpose of a call. The bytes of each purpose are counted separately (SentBytes).
enum class Purpose { other, gradients, parameters, statistics, activations };

/// `count` numbers in device memory, as a collective sees them. An object made from a tensor keeps
/// the tensor's device; `device` is null for memory that belongs to no tensor. Numbers of 16 bits
/// are added in float32. How often their sum is rounded depends on the backend (host_transport.h).
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
  Elements(const BasicTensor<Bf16>& x)
      : Elements(x.data(), x.elements(), ElementType::bf16, &x.home().device()) {}
  Elements(const BasicTensor<Fp16>& x)
      : Elements(x.data(), x.elements(), ElementType::fp16, &x.home().device()) {}
  Elements(const AnyTensor& x) : Elements(x.data(), x.elements(), x.type(), &x.home().device()) {}

  /// `count` elements from element `first` on.
  Elements part(int64_t first, int64_t count) const;
};

/// One call of one rank.
struct Call {
  enum class Op { all_reduce, broadcast, all_gather, reduce_scatter, send, receive, barrier };
  Op op = Op::barrier;
  Elements mine{};  // the rank's own share, or what is sent, received, added up or broadcast
  Elements all{};   // of all ranks, W times mine
  int peer = 0;     // root, or the other side of send and receive
  Reduction reduction = Reduction::sum;
  std::string label{};  // whom it is for, "bn1"; may be empty
  Purpose purpose = Purpose::other;

  /// The facts that must be the same on all ranks. Examples: "all_reduce of 87360 f32, sum",
  /// "broadcast of 10 i64, root 0", "all_gather of 21 f32 for bn1". `peer_name` is the name of a
  /// transfer's other side, by default "rank 1".
  std::string text(const std::string& peer_name = "") const;
  /// The same facts as one number, without the label.
  uint64_t number() const;
  /// Whether the call adds up numbers of all ranks.
  bool reduces() const;
  /// Whether the call is between two ranks, not all.
  bool is_transfer() const { return op == Op::send || op == Op::receive; }
  /// Bytes that leave rank `rank` of `world_size` if the call goes round a ring, as over TCP
  /// (tcp_transport.cpp). This is the best estimate for a library that does not tell what it sends.
  int64_t ring_bytes(int rank, int world_size) const;
};

/// "all_reduce", "broadcast", ...
const char* name_of(Call::Op op);

/// Numbers `first` to `first + count - 1` of a message that goes round a ring.
struct RingPart {
  int64_t first, count;
};

/// Part `number` of a message of `count` numbers, cut into `world_size` parts of nearly equal
/// length, one per rank. Parts are counted round the ring: number -1 is the last one.
inline RingPart ring_part(int64_t count, int number, int world_size) {
  const int64_t place = ((number % world_size) + world_size) % world_size;
  const int64_t first = count * place / world_size;
  return {first, count * (place + 1) / world_size - first};
}

// --- Who makes calls -----------------------------------------------------------------------------

/// How many bytes a rank has given to others.
///
/// The bytes are counted where they leave, not computed from the calls: a message too many is in
/// the count. `shm` counts the bytes that it writes into the shared memory, once for each rank that
/// takes them. `tcp` counts the bytes that its connections have taken. Gloo and NCCL do not tell
/// what they send: there the count is what a ring would send for the calls (Call::ring_bytes()).
///
/// The thread that runs the calls adds; any other thread may read. The counts are relaxed: they
/// must not order the threads, because that would hide a missing wait from ThreadSanitizer.
class SentBytes {
 public:
  /// `where` names the place where the bytes are counted, for summaries.
  explicit SentBytes(std::string where) : where_(std::move(where)) {}

  void add(Purpose purpose, int64_t bytes) {
    counts_[size_t(purpose)].fetch_add(bytes, std::memory_order_relaxed);
  }
  int64_t of(Purpose purpose) const {
    return counts_[size_t(purpose)].load(std::memory_order_relaxed);
  }
  int64_t of_all() const {
    int64_t sum = 0;
    for (const auto& count : counts_) sum += count.load(std::memory_order_relaxed);
    return sum;
  }
  const std::string& where() const { return where_; }

 private:
  std::string where_;
  std::array<std::atomic<int64_t>, 5> counts_{};
};

/// The recorder of the calls of a group of ranks.
struct FlightGroup {
  std::shared_ptr<FlightRecorder> recorder{};
  uint64_t number = 0;         // FlightEntry::group
  std::vector<int> members{};  // the ranks' numbers in the job, by rank in the group; empty: all
};

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
  /// This rank's name in errors: "rank 1". In a group of only some of a job's ranks, the name has
  /// the job's numbers: "rank 3 of ranks 2, 3".
  const std::string& who() const { return who_; }
  /// The name of any rank of this group.
  std::string name_of_rank(int rank) const {
    return name_of_ ? name_of_(rank) : fmt::format("rank {}", rank);
  }

  /// x becomes the sum, or average, of all ranks' x.
  void all_reduce(Stream stream, const Elements& x, Reduction reduction = Reduction::sum);
  /// x becomes the root's x.
  void broadcast(Stream stream, const Elements& x, int root);
  /// all [W n] becomes the mine [n] of rank 0, rank 1, ...
  void all_gather(Stream stream, const Elements& mine, const Elements& all);
  /// mine [n] of rank r becomes the sum, or average, of part r of all ranks' all [W n].
  void reduce_scatter(Stream stream, const Elements& all, const Elements& mine,
                      Reduction reduction = Reduction::sum);
  void send(Stream stream, const Elements& x, int to);
  void receive(Stream stream, const Elements& x, int from);
  /// Holds later work on the stream back until all ranks have reached the barrier.
  void barrier(Stream stream);

  /// close_group() enqueues all calls since open_group(), in their order. Sends and receives that
  /// follow each other on a stream then run at the same time. Only so can every rank send before
  /// it receives (ncclGroupStart, ncclGroupEnd).
  void open_group();
  void close_group();

  /// The bytes that this rank has given to others so far, in calls of one purpose or in all calls.
  /// Only calls that have run are counted: synchronize their streams first. See SentBytes.
  int64_t bytes_sent(Purpose purpose) const { return sent_->of(purpose); }
  int64_t bytes_sent() const { return sent_->of_all(); }
  /// The bytes that an all-reduce of x adds to bytes_sent(). That is 2 (W-1)/W of x as round a
  /// ring, unless the communicator has another way for sums as small as x.
  virtual int64_t bytes_of_all_reduce(const Elements& x) const;
  /// The place where bytes_sent() are counted: "shm", "its calls to NCCL", ...
  const std::string& bytes_counted_in() const { return sent_->where(); }

  /// Sets the purpose of the calls from now on (CallPurpose). Returns the purpose before.
  Purpose replace_purpose(Purpose purpose) { return std::exchange(purpose_, purpose); }
  /// Sets the label of the calls from now on (CallLabel). Returns the label before.
  std::string replace_label(std::string label) { return std::exchange(label_, std::move(label)); }
  /// Names this group's calls in traces, by what its ranks differ in: "along data".
  void set_name(std::string name) { name_ = std::move(name); }
  /// Sets what name_of_rank() and who() say. `members` says which of the job's ranks this group
  /// has, if not all.
  void set_names(std::function<std::string(int rank)> name_of, const std::string& members = "");
  /// Records all calls in `flight`. Must come before the first call.
  void record_in(FlightGroup flight) { flight_ = std::move(flight); }

 protected:
  Communicator(int rank, int world_size,
               std::shared_ptr<SentBytes> sent = std::make_shared<SentBytes>("nothing"))
      : rank_(rank),
        world_size_(world_size),
        sent_(std::move(sent)),
        who_(fmt::format("rank {}", rank)) {}
  const std::shared_ptr<SentBytes>& sent() const { return sent_; }
  /// Enqueues one collective, or transfers that run at the same time. `flight` has the number, from
  /// 1, and must be told when the work begins and ends.
  virtual void enqueue(Stream stream, const std::vector<Call>& together, FlightCall flight) = 0;

 private:
  struct Issued {
    Stream stream;
    Call call;
  };
  void issue(Stream stream, Call call);
  std::optional<ScopedRange> range_on(Stream stream) const;
  void check(Stream stream, const Call& call) const;
  FlightCall flight_of(const std::vector<Call>& together);
  uint64_t members_of(const std::vector<Call>& together) const;

  int rank_, world_size_;
  std::shared_ptr<SentBytes> sent_;
  Purpose purpose_ = Purpose::other;
  std::string label_, who_, name_;
  std::function<std::string(int rank)> name_of_{};
  FlightGroup flight_;
  uint64_t collectives_ = 0, transfers_ = 0;  // the number so far
  bool open_ = false;
  std::vector<Issued> issued_;  // in the open group
};

/// While this object lives, the rank's calls have a label, such as a layer: errors name the label.
class CallLabel {
 public:
  CallLabel(Communicator& comm, std::string label)
      : comm_(comm), before_(comm.replace_label(std::move(label))) {}
  ~CallLabel() { comm_.replace_label(std::move(before_)); }
  CallLabel(const CallLabel&) = delete;
  CallLabel& operator=(const CallLabel&) = delete;

 private:
  Communicator& comm_;
  std::string before_;
};

/// While this object lives, the rank's calls have a purpose: their bytes are counted under it.
class CallPurpose {
 public:
  CallPurpose(Communicator& comm, Purpose purpose)
      : comm_(comm), before_(comm.replace_purpose(purpose)) {}
  ~CallPurpose() { comm_.replace_purpose(before_); }
  CallPurpose(const CallPurpose&) = delete;
  CallPurpose& operator=(const CallPurpose&) = delete;

 private:
  Communicator& comm_;
  Purpose before_;
};

}  // namespace lockstep
