#pragma once
// The ranks of one unique id, and how their work meets on the streams.

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nccl.h"
#include "runtime/model.h"

namespace cuda_model::nccl {

/// One call of one rank.
struct Operation {
  enum class Kind { all_reduce, broadcast, all_gather, reduce_scatter, send, receive };
  Kind kind = Kind::all_reduce;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  int peer = 0;  // root, or the other side
  cudaStream_t stream = nullptr;
  int fault = 0;  // the result that appears when the stream gets there, instead of the work

  bool is_transfer() const { return kind == Kind::send || kind == Kind::receive; }
};

size_t size_of(ncclDataType_t type);
/// Runs a collective on the calls of all ranks, in rank order.
void execute(const std::vector<Operation>& ranks);

struct Clique;

/// One rank. All but the constants is guarded by the clique's mutex.
struct Member {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  Device* device = nullptr;
  int device_index = 0;  // as the process counts
  bool blocking = true;

  ncclResult_t state = ncclInProgress;
  std::string last_error;
  bool aborted = false, finalized = false;
  uint64_t launches = 0;     // with collectives, that all ranks must join
  uint64_t collectives = 0;  // so far
  int running = 0;           // launches that have not ended

  // Of nccl_use.h, and guarded there.
  bool gone = false;  // aborted or destroyed
  int calls = 0;      // in progress, all of one thread
  std::thread::id caller;
  const char* function = "";  // the first of them
};

/// One launch of one rank: what it called within a group.
struct Launch {
  std::shared_ptr<Member> member;
  std::vector<Operation> operations;
};

/// Whether a kernel of NCCL is on that GPU, of any communicator.
bool runs_kernels(const Device* device);

struct Clique {
  explicit Clique(int size) : members(size) {}

  /// Called when a rank arrives. The last one starts all ranks, or tells them that one GPU is used
  /// twice; then the answer is true.
  bool join(const std::shared_ptr<Member>& member);
  /// Runs the launch in the background: meets the other ranks on the host if it has collectives,
  /// then goes to the streams.
  void launch(Launch launch);

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Member>> members;  // by rank; null: not come yet
  int communicators = 0;                         // of the callers

 private:
  struct Meeting {
    std::vector<Operation> ranks;
    int arrived = 0, left = 0;
    bool done = false;
  };
  struct Transfer {
    Operation send, receive;
    int sides = 0;
    bool done = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  void begin();
  void run(Launch& launch, const std::vector<cudaStream_t>& streams);
  bool enter(Member& member, Lock& lock);
  void work(Launch& launch, Lock& lock);
  std::shared_ptr<Transfer> post(int rank, const Operation& operation);
  void meet(Member& member, const Operation& operation, Lock& lock);
  /// Waits until `ready`, or until the rank is aborted; returns false then.
  template <class Ready>
  bool wait(Member& member, Lock& lock, Ready ready);

  std::map<uint64_t, Meeting> meetings_;                               // by number
  std::map<std::array<int, 3>, std::shared_ptr<Transfer>> transfers_;  // from, to, number
  std::map<std::array<int, 3>, int> posted_;                           // from, to, is send
};

}  // namespace cuda_model::nccl
