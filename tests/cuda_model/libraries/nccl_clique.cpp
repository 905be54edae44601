#include "libraries/nccl_clique.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "runtime/environment.h"
#include "runtime/turn.h"

namespace cuda_model::nccl {
namespace {

// NCCL's background work takes a while, here too: a caller that does not wait is caught.
constexpr auto kSetUpTime = std::chrono::milliseconds(2);
constexpr auto kLaunchTime = std::chrono::microseconds(300);

/// The text of NCCL's own check, "" if every rank has a GPU of its own.
std::string shared_gpu(const std::vector<std::shared_ptr<Member>>& members) {
  for (size_t rank = 0; rank < members.size(); ++rank) {
    for (size_t other = 0; other < members.size(); ++other) {
      if (other == rank || members[other]->device != members[rank]->device) continue;
      char text[128];
      std::snprintf(text, sizeof text,
                    "Duplicate GPU detected : rank %zu and rank %zu both on CUDA device %x", rank,
                    other, members[rank]->device->index << 12);
      return text;
    }
  }
  return "";
}

bool agree(const Operation& a, const Operation& b) {
  const bool rooted = a.kind == Operation::Kind::broadcast;
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.reduction == b.reduction &&
         (!rooted || a.peer == b.peer);
}

/// NCCL's kernels on each GPU now, of all cliques. A kernel stays there until its ranks have come.
class Room {
 public:
  bool take(const Device* device) {
    const std::lock_guard lock(mutex_);
    const int most = integer_variable("CUDA_MODEL_NCCL_ROOM", 0);
    if (most > 0 && taken_[device] >= most) return false;
    ++taken_[device];
    return true;
  }
  void give_back(const Device* device) {
    const std::lock_guard lock(mutex_);
    --taken_[device];
  }
  bool is_empty(const Device* device) {
    const std::lock_guard lock(mutex_);
    return taken_[device] == 0;
  }

 private:
  std::mutex mutex_;
  std::map<const Device*, int> taken_;
};

Room& room() {
  static Room& room = *new Room;
  return room;
}

std::vector<cudaStream_t> streams_of(const Launch& launch) {
  std::vector<cudaStream_t> streams;
  for (const Operation& operation : launch.operations) {
    if (std::find(streams.begin(), streams.end(), operation.stream) == streams.end()) {
      streams.push_back(operation.stream);
    }
  }
  return streams;
}

}  // namespace

bool runs_kernels(const Device* device) { return !room().is_empty(device); }

template <class Ready>
bool Clique::wait(Member& member, Lock& lock, Ready ready) {
  changed.wait(lock, [&] { return member.aborted || ready(); });
  return !member.aborted;
}

// --- Set-up --------------------------------------------------------------------------------------

bool Clique::join(const std::shared_ptr<Member>& member) {
  const Lock lock(mutex);
  members[member->rank] = member;
  const auto come = [](const auto& other) { return other != nullptr; };
  if (!std::all_of(members.begin(), members.end(), come)) return false;
  std::thread([clique = member->clique] {
    std::this_thread::sleep_for(kSetUpTime);
    clique->begin();
  }).detach();
  return true;
}

void Clique::begin() {
  const Lock lock(mutex);
  const std::string refused = shared_gpu(members);
  for (const auto& member : members) {
    member->state = refused.empty() ? ncclSuccess : ncclInvalidUsage;
    member->last_error = refused;
  }
  changed.notify_all();
}

// --- Launches ------------------------------------------------------------------------------------

void Clique::launch(Launch launch) {
  // NCCL sorts the collectives of a group by size and runs its parts side by side.
  std::stable_sort(launch.operations.begin(), launch.operations.end(),
                   [](const Operation& a, const Operation& b) {
                     if (a.is_transfer() != b.is_transfer()) return a.is_transfer();
                     return !a.is_transfer() &&
                            a.count * size_of(a.type) > b.count * size_of(b.type);
                   });
  const bool meets = !launch.operations.back().is_transfer();
  {
    const Lock lock(mutex);
    launch.member->state = ncclInProgress;
    ++launch.member->running;
    if (meets) ++launch.member->launches;
    changed.notify_all();
  }
  std::thread([this, keep = launch.member->clique, launch = std::move(launch), meets]() mutable {
    Member& member = *launch.member;
    Lock lock(mutex);
    const bool all = wait(member, lock, [&, number = member.launches] {
      return !meets || std::all_of(members.begin(), members.end(),
                                   [&](const auto& other) { return other->launches >= number; });
    });
    lock.unlock();
    std::this_thread::sleep_for(kLaunchTime);
    if (all) return run(launch, streams_of(launch));
    lock.lock();
    --member.running;
    changed.notify_all();
  }).detach();
}

/// The work is a task of the first stream; the others wait for it, and continue after it.
void Clique::run(Launch& launch, const std::vector<cudaStream_t>& streams) {
  struct Kernel {
    Launch launch;
    size_t arrived = 0;
    bool done = false;
  };
  const auto kernel = std::make_shared<Kernel>(Kernel{launch});
  cudaError_t error = cudaSuccess;
  for (cudaStream_t stream : streams) {
    const bool first = stream == streams.front();
    const cudaError_t enqueued = enqueue(stream, [this, kernel, first, total = streams.size()] {
      Member& member = *kernel->launch.member;
      Lock lock(mutex);
      ++kernel->arrived;
      changed.notify_all();
      if (!first) {
        wait(member, lock, [&] { return kernel->done; });
        return;
      }
      if (wait(member, lock, [&] { return kernel->arrived == total; }) && enter(member, lock)) {
        work(kernel->launch, lock);
        room().give_back(member.device);
      }
      kernel->done = true;
      --member.running;
      changed.notify_all();
    });
    if (enqueued != cudaSuccess) error = enqueued;
  }
  const Lock lock(mutex);
  if (launch.member->state == ncclInProgress) {
    launch.member->state = error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  }
  if (error != cudaSuccess) launch.member->last_error = cudaGetErrorString(error);
  changed.notify_all();
}

/// Until the GPU has room for a kernel; false if the rank is aborted. Other cliques wake nobody
/// here.
bool Clique::enter(Member& member, Lock& lock) {
  while (!member.aborted) {
    if (room().take(member.device)) return true;
    changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  return false;
}

void Clique::work(Launch& launch, Lock& lock) {
  Member& member = *launch.member;
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (const Operation& operation : launch.operations) {
    if (operation.fault != 0) {  // noticed in the background; nothing ends any more
      member.state = static_cast<ncclResult_t>(operation.fault);
      member.last_error = "planted by CUDA_MODEL_FAULT";
      wait(member, lock, [] { return false; });
    }
    if (member.aborted) return;
    if (operation.is_transfer()) {
      transfers.push_back(post(member.rank, operation));
    } else {
      meet(member, operation, lock);
    }
  }
  for (const auto& transfer : transfers) {
    wait(member, lock, [&] { return transfer->done; });
  }
}

/// One side of a transfer has arrived; with the second it is done, unless that has been aborted.
std::shared_ptr<Clique::Transfer> Clique::post(int rank, const Operation& operation) {
  const bool is_send = operation.kind == Operation::Kind::send;
  const int from = is_send ? rank : operation.peer, to = is_send ? operation.peer : rank;
  const int number = posted_[{from, to, is_send}]++;
  const auto found = transfers_.try_emplace({from, to, number}, nullptr).first;
  if (found->second == nullptr) found->second = std::make_shared<Transfer>();
  const std::shared_ptr<Transfer> transfer = found->second;
  (is_send ? transfer->send : transfer->receive) = operation;
  if (++transfer->sides < 2 || members[operation.peer]->aborted) return transfer;
  if (transfer->send.count != transfer->receive.count ||
      transfer->send.type != transfer->receive.type) {
    die("NCCL: rank " + std::to_string(from) + " sends something else than rank " +
        std::to_string(to) + " receives");
  }
  const Turn turn(nullptr);
  std::memmove(transfer->receive.to, transfer->send.from,
               operation.count * size_of(operation.type));
  transfer->done = true;
  transfers_.erase(found);
  changed.notify_all();
  return transfer;
}

/// A collective: each rank waits for all, the last one does the work. It never ends if a rank has
/// been aborted after it arrived.
void Clique::meet(Member& member, const Operation& operation, Lock& lock) {
  const uint64_t number = member.collectives++;
  Meeting& meeting = meetings_[number];
  meeting.ranks.resize(members.size());
  meeting.ranks[member.rank] = operation;
  const bool whole = std::none_of(members.begin(), members.end(),
                                  [](const auto& other) { return other->aborted; });
  if (++meeting.arrived == static_cast<int>(members.size()) && whole) {
    for (const Operation& other : meeting.ranks) {
      if (!agree(operation, other)) die("NCCL: the ranks' collectives do not agree");
    }
    execute(meeting.ranks);
    meeting.done = true;
    changed.notify_all();
  }
  if (!wait(member, lock, [&] { return meeting.done; })) return;
  if (++meeting.left == static_cast<int>(members.size())) meetings_.erase(number);
}

}  // namespace cuda_model::nccl
