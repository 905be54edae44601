#pragma once
// A transport carries numbers between the processes of a group, from host memory to host memory.
// There are three: shared memory (shm_transport.cpp), connections between every two ranks
// (tcp_transport.cpp) and the library Gloo (gloo_transport.cpp).

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/comm/communicator.h"
#include "common/core/error.h"

namespace lockstep {

class Store;

class HostTransport {
 public:
  virtual ~HostTransport() = default;

  /// "shm", "tcp" or "gloo".
  virtual std::string description() const = 0;
  /// Does this rank's part of a collective in host memory. `number` counts the collectives from 1
  /// and is the same on all ranks. Blocks. Throws PeerLost, saying why, if another rank died or did
  /// not come in time.
  virtual void run(const Call& collective, uint64_t number) = 0;
  /// Sends and receives all at the same time: no transfer waits for another.
  virtual void transfer(const std::vector<Call>& calls) = 0;
  /// Sets the other ranks' names in errors, where errors name any. Must come before the first call.
  virtual void name_peers(const std::function<std::string(int rank)>&) {}
  /// Ends the connections to all other ranks, so that nobody waits for this rank. Any thread may
  /// call it, also while run() or transfer() waits. Does nothing if the transport has no way to.
  virtual void break_off() {}
  /// Bytes that run() and transfer() have given to other ranks so far. Call it on the thread that
  /// calls these two.
  virtual int64_t bytes_sent() const = 0;
  /// The largest sum, in bytes, that a rank sends whole to every other rank. Larger sums go as
  /// round a ring.
  virtual int64_t largest_whole_sum() const { return 0; }
  /// The place where bytes_sent() are counted, for summaries; by default where the bytes leave.
  virtual std::string counted_in() const { return description(); }
};

/// The transports of one rank, one for each of its groups. The rank's calls follow each other,
/// whatever their groups. After one call has failed, later calls never come, and peers in other
/// groups would wait for these calls.
class RankTransports {
 public:
  void add(const std::shared_ptr<HostTransport>& transport) {
    const std::lock_guard lock(mutex_);
    all_.push_back(transport);
  }
  void break_off() const {
    const std::lock_guard lock(mutex_);
    for (const std::weak_ptr<HostTransport>& each : all_) {
      if (const auto transport = each.lock()) transport->break_off();
    }
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<HostTransport>> all_;
};

// --- What transports have in common --------------------------------------------------------------

/// Calls work(T()) with the type of the elements.
template <class Work>
void with_type(ElementType type, Work work) {
  switch (type) {
    // NOLINTNEXTLINE(bugprone-branch-clone): each branch calls it with another type.
    case ElementType::f32:
      return work(float());
    case ElementType::f64:
      return work(double());
    case ElementType::i64:
      return work(int64_t());
    case ElementType::bf16:
      return work(Bf16());
    case ElementType::fp16:
      return work(Fp16());
  }
}

/// The type in which numbers are added: float32 for those of 16 bits, else their own type.
template <class T>
using Added = decltype(T() + T());

/// The factor that turns a sum over `world_size` ranks into the result: 1, or 1/W for the average.
template <class T>
Added<T> factor_of(Reduction reduction, int world_size) {
  return reduction == Reduction::sum ? 1 : Added<T>(1) / Added<T>(world_size);
}

/// sum = (a + b) factor, n numbers each. Numbers of 16 bits are rounded once, at the end.
template <class T>
void add_two(T* sum, const T* a, const T* b, int64_t n, Added<T> factor = 1) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] = (a[i] + b[i]) * factor;
}

// --- Shared memory -------------------------------------------------------------------------------

/// The ranks cannot share memory: they are on several hosts, or in containers that do not see each
/// other, or the system refuses the memory. Another transport may serve them.
class NoSharedMemory : public ErrorOfKind<NoSharedMemory> {
 public:
  using ErrorOfKind::ErrorOfKind;
};

/// Connects this rank with all others of the store, which is not needed afterwards. A peer that
/// does not do its part of a collective within `timeout_seconds` is lost. Sums have the same bits
/// on all ranks, and in every run with the same number of ranks. connect_tcp()'s sums have the same
/// bits, except sums of 16-bit numbers over three or more ranks: here these are rounded once.
///
/// Throws NoSharedMemory on all ranks alike, with the reason of the first rank that has one. Throws
/// PeerLost if a rank does not come.
std::shared_ptr<HostTransport> connect_shm(Store& store, double timeout_seconds);

// --- TCP -----------------------------------------------------------------------------------------

/// Connects this rank with all others of the store, which is not needed afterwards. A peer that is
/// silent for `timeout_seconds`, or takes longer for a whole message, is lost.
///
/// Reductions go round a ring in parts (see "The ring" in tcp_transport.cpp). So each part is added
/// up once, in an order that the ring fixes. All ranks get the same bits, and so does every run
/// with the same number of ranks. Ranks whose counts differ wait for each other, or take one
/// message for another: LOCKSTEP_DEBUG=collectives finds this (roll_call.h).
///
/// Throws PeerLost if a rank does not come. After an error all connections are closed, so that the
/// peers that wait for this rank learn of it.
std::shared_ptr<HostTransport> connect_tcp(Store& store, double timeout_seconds);

// --- Gloo ----------------------------------------------------------------------------------------

/// The place where each rank of a group leaves what the others need to connect.
struct RendezvousStore {
  std::function<void(const std::string& key, const std::string& value)> set;
  /// Waits until some rank has set the key. Throws when that takes too long.
  std::function<std::string(const std::string& key)> get;
};

/// The reason why there is no Gloo, "this build has no Gloo"; empty if there is. Loads Gloo.
std::string gloo_availability();

/// Connects this rank with all others by `store`, over the network interface that has the address
/// `host`. A peer that is silent for `timeout_seconds` is lost. Uses ring algorithms, so that with
/// the same number of ranks sums have the same bits in every run. Mirrors PyTorch, where Gloo
/// carries the collectives between CPU processes.
///
/// Throws EnvironmentError if there is no Gloo, PeerLost if the ranks do not find each other. A
/// mistake that Gloo notices in its own thread (counts that differ among the ranks) ends the
/// process.
std::shared_ptr<HostTransport> connect_gloo(int rank, int world_size, const RendezvousStore& store,
                                            const std::string& host, double timeout_seconds);

/// The one function that the library exports.
extern "C" void lockstep_connect_gloo(std::shared_ptr<HostTransport>& connected, int rank,
                                      int world_size, const RendezvousStore& store,
                                      const std::string& host, double timeout_seconds);

}  // namespace lockstep
