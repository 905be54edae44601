// NCCL's calls: what they check, and groups.

#include "nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "libraries/nccl_use.h"
#include "runtime/environment.h"

using namespace cuda_model;
using namespace cuda_model::nccl;
using Kind = Operation::Kind;

struct ncclComm {
  std::shared_ptr<Member> member;
};

namespace {

thread_local std::string last_error;

struct Init {
  std::shared_ptr<Member> member;
  int fault;
};

/// What the calling thread has asked for since ncclGroupStart.
struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Init> inits;
  std::vector<Launch> launches;  // one per communicator
};
thread_local Group group;

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
  last_error = why;
  if (group.depth > 0 && group.error == ncclSuccess) group.error = result;
  return result;
}

/// The cliques some of whose ranks have not arrived, by unique id.
std::map<std::string, std::shared_ptr<Clique>>& open_cliques() {
  static auto& cliques = *new std::map<std::string, std::shared_ptr<Clique>>;
  return cliques;
}

std::shared_ptr<Clique> clique_of(const ncclUniqueId& id, int size) {
  const std::lock_guard lock(model_mutex());
  auto& clique = open_cliques()[std::string(id.internal, NCCL_UNIQUE_ID_BYTES)];
  if (clique == nullptr) clique = std::make_shared<Clique>(size);
  return clique;
}

void start(const Init& init) {
  if (init.fault == ncclInProgress) return;  // planted: a rank that never comes
  const std::shared_ptr<Clique>& clique = init.member->clique;
  if (!clique->join(init.member)) return;
  const std::lock_guard lock(model_mutex());
  std::erase_if(open_cliques(), [&](const auto& open) { return open.second == clique; });
}

/// All communicators ever: a handle that somebody keeps too long must be known (nccl_use.h).
ncclComm_t new_communicator(const std::shared_ptr<Member>& member) {
  static auto& all = *new std::deque<ncclComm>;
  const std::lock_guard lock(model_mutex());
  return &all.emplace_back(ncclComm{member});
}

/// The caller gives its communicator up. Streams may still hold the rank.
void release(ncclComm_t comm, const Use& use) {
  use.end();
  const std::shared_ptr<Clique>& clique = comm->member->clique;
  const std::lock_guard lock(clique->mutex);
  if (--clique->communicators == 0) clique->members.clear();  // they hold the clique
}

ncclResult_t wait_if_blocking(Member& member) {
  std::unique_lock lock(member.clique->mutex);
  if (!member.blocking) return member.state;
  member.clique->changed.wait(lock, [&] { return member.state != ncclInProgress; });
  return member.state;
}

/// Planted in ncclGroupEnd: the rank dies within the call, or NCCL finds in it that another one
/// has.
void die_in_call(const Fault& fault, Member& member) {
  const std::lock_guard lock(member.clique->mutex);
  member.state = static_cast<ncclResult_t>(fault.code);
  member.last_error = "planted by CUDA_MODEL_FAULT";
}

ncclResult_t close_group() {
  const Group closed = std::exchange(group, {});
  if (closed.error != ncclSuccess) return closed.error;
  if (!closed.inits.empty() && !closed.launches.empty()) {
    return refuse(ncclInvalidUsage, "ncclCommInitRank and collectives in one group");
  }
  std::vector<std::shared_ptr<Member>> members;
  for (const Init& init : closed.inits) members.push_back(init.member);
  for (const Launch& launch : closed.launches) members.push_back(launch.member);
  std::deque<Use> uses;
  for (const auto& member : members) uses.emplace_back("ncclGroupEnd", member);
  for (const Init& init : closed.inits) start(init);
  if (std::ranges::any_of(members, [](const auto& member) { return !member->blocking; })) {
    count_call("thread");
  }
  const Fault fault = closed.launches.empty() ? Fault{} : take_fault("ncclGroupEnd");
  for (const Launch& launch : closed.launches) {
    if (fault.code != 0) {
      die_in_call(fault, *launch.member);
    } else {
      launch.member->clique->launch(launch);
    }
  }
  ncclResult_t result = ncclSuccess;
  for (const auto& member : members) {
    const ncclResult_t state = wait_if_blocking(*member);
    if (result == ncclSuccess) result = state;
  }
  return result;
}

ncclResult_t check(const ncclComm_t comm, const Operation& operation) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "the communicator is NULL");
  Member& member = *comm->member;
  const int size = static_cast<int>(member.clique->members.size());
  {
    const std::lock_guard lock(member.clique->mutex);
    if (member.state == ncclInProgress) {
      return refuse(
          ncclInvalidArgument,
          "Attempt to use communicator before the previous operation returned ncclSuccess");
    }
    if (member.state != ncclSuccess) return refuse(member.state, member.last_error);
  }
  if (operation.peer < 0 || operation.peer >= size) {
    return refuse(ncclInvalidArgument,
                  "rank " + std::to_string(operation.peer) + " of " + std::to_string(size));
  }
  if (operation.type < 0 || operation.type >= ncclNumTypes || operation.reduction < 0 ||
      operation.reduction >= ncclNumOps) {
    return refuse(ncclInvalidArgument, "no such data type or reduction");
  }
  const auto stream = find_stream(operation.stream);
  if (stream == nullptr || &stream->device != member.device) {
    return refuse(ncclInvalidArgument, "the stream is not of the communicator's device");
  }
  if ((operation.kind != Kind::receive && operation.from == nullptr) ||
      (operation.kind != Kind::send && operation.to == nullptr)) {
    return refuse(ncclInvalidArgument, "a buffer is NULL");
  }
  return ncclSuccess;
}

/// Every collective and transfer: one more operation of the group, or a group of its own.
ncclResult_t call(const char* function, ncclComm_t comm, Operation operation) {
  const Fault fault = take_fault(function);
  if (fault.code != 0 && !fault.async) {
    return refuse(static_cast<ncclResult_t>(fault.code), "planted by CUDA_MODEL_FAULT");
  }
  operation.fault = fault.code;
  std::optional<Use> use;
  if (comm != nullptr) use.emplace(function, comm->member);
  if (operation.count == 0) return ncclSuccess;
  if (const ncclResult_t refused = check(comm, operation)) return refused;
  ncclGroupStart();
  Launch* own = nullptr;
  for (Launch& launch : group.launches) {
    if (launch.member == comm->member) own = &launch;
  }
  if (own == nullptr) own = &group.launches.emplace_back(Launch{comm->member, {}});
  own->operations.push_back(operation);
  return ncclGroupEnd();
}

}  // namespace

// --- About the library ---------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

/// As in NCCL: the last error of the process's threads, possibly several lines.
const char* ncclGetLastError(ncclComm_t comm) {
  if (comm != nullptr) {
    const Use use("ncclGetLastError", comm->member);
    const std::lock_guard lock(comm->member->clique->mutex);
    if (!comm->member->last_error.empty()) last_error = comm->member->last_error;
  }
  return last_error.c_str();
}

// --- Communicators -------------------------------------------------------------------------------

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const int planted = planted_code("ncclGetUniqueId")) {
    return refuse(static_cast<ncclResult_t>(planted), "planted by CUDA_MODEL_FAULT");
  }
  static std::atomic<uint64_t> number{0};
  const uint64_t mine = ++number;
  *id = {};
  std::memcpy(id->internal, &mine, sizeof mine);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const Fault fault = take_fault("ncclCommInitRankConfig");
  if (fault.code != 0 && !fault.async) {
    return refuse(static_cast<ncclResult_t>(fault.code), "planted by CUDA_MODEL_FAULT");
  }
  if (comm == nullptr || size < 1 || rank < 0 || rank >= size) {
    return refuse(ncclInvalidArgument, "no such rank");
  }
  if (config != nullptr && (config->size != sizeof(ncclConfig_t) || config->magic != 0xcafebeef)) {
    return refuse(ncclInvalidArgument, "the config was not made by NCCL_CONFIG_INITIALIZER");
  }
  const auto member = std::make_shared<Member>();
  member->device = current_device();
  if (member->device == nullptr || sticky_error() != cudaSuccess) {
    return refuse(ncclUnhandledCudaError, "no usable GPU");
  }
  cudaGetDevice(&member->device_index);
  member->clique = clique_of(id, size);
  member->rank = rank;
  member->blocking =
      integer_variable("NCCL_COMM_BLOCKING", config == nullptr || config->blocking != 0) != 0;
  {
    const std::lock_guard lock(member->clique->mutex);
    ++member->clique->communicators;
  }
  *comm = new_communicator(member);  // at once: a caller that does not block asks it for progress
  ncclGroupStart();
  group.inits.push_back({member, fault.code});
  const ncclResult_t result = ncclGroupEnd();
  return group.depth > 0 ? ncclInProgress : result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (comm == nullptr || state == nullptr) return refuse(ncclInvalidArgument, "NULL");
  count_call("ncclCommGetAsyncError");
  const Use use("ncclCommGetAsyncError", comm->member);
  const std::lock_guard lock(comm->member->clique->mutex);
  *state = comm->member->state;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = static_cast<int>(comm->member->clique->members.size());
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->member->device_index;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->member->rank;
  return ncclSuccess;
}

/// Ready again when what was launched has ended.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const Fault fault = take_fault("ncclCommFinalize");
  if (fault.code != 0 && !fault.async) {
    return refuse(static_cast<ncclResult_t>(fault.code), "planted by CUDA_MODEL_FAULT");
  }
  const std::shared_ptr<Member> member = comm->member;
  const Use use("ncclCommFinalize", member);
  if (group.depth == 0) {
    // Up to 2.26 the first call's thread still works on what the second call's thread changes.
    static thread_local std::weak_ptr<Clique> finalized;
    if (finalized.lock() == member->clique) {
      return refuse(ncclInvalidUsage, "one thread finalizes several ranks within a group only");
    }
    finalized = member->clique;
  }
  {
    const std::lock_guard lock(member->clique->mutex);
    if (member->state != ncclSuccess || member->finalized) {
      return refuse(ncclInvalidArgument, "not ready, or finalized before");
    }
    member->finalized = true;
    member->state = ncclInProgress;
  }
  std::thread([member, ends = fault.code != ncclInProgress] {
    std::unique_lock lock(member->clique->mutex);
    member->clique->changed.wait(lock,
                                 [&] { return member->aborted || (ends && member->running == 0); });
    if (member->state == ncclInProgress) member->state = ncclSuccess;
    member->clique->changed.notify_all();
  }).detach();
  return wait_if_blocking(*member);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const Use use("ncclCommDestroy", comm->member);
  {
    std::unique_lock lock(comm->member->clique->mutex);
    if (comm->member->state == ncclInProgress) {
      return refuse(ncclInvalidArgument, "destroyed before it was ready");
    }
    comm->member->clique->changed.wait(lock, [&] { return comm->member->running == 0; });
  }
  release(comm, use);
  return ncclSuccess;
}

/// The kernels of this rank end as they are. Frees memory of the GPU, which waits until they have
/// ended, also for a kernel that is queued after other work, and for those of all other
/// communicators; but not on a GPU that has failed.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const Use use("ncclCommAbort", comm->member);
  Member& member = *comm->member;
  {
    std::unique_lock lock(member.clique->mutex);
    member.aborted = true;
    member.clique->changed.notify_all();
    const auto all_gone = [&] {  // only the last one to go frees anything
      for (const auto& other : member.clique->members) {
        if (other == nullptr || !other->aborted) return true;
      }
      for (const auto& other : member.clique->members) {
        if (other->running > 0 && other->device->sticky == 0) return false;
      }
      return true;
    };
    const auto idle = [&] { return member.device->sticky != 0 || !runs_kernels(member.device); };
    while (!all_gone() || !idle()) {
      member.clique->changed.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
  release(comm, use);
  return ncclSuccess;
}

// --- Groups --------------------------------------------------------------------------------------

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  return --group.depth > 0 ? ncclSuccess : close_group();
}

// --- Collectives and transfers -------------------------------------------------------------------

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return call("ncclBroadcast", comm,
              {Kind::broadcast, from, to, count, type, ncclSum, root, stream});
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclAllReduce", comm,
              {Kind::all_reduce, from, to, count, type, reduction, 0, stream});
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclReduceScatter", comm,
              {Kind::reduce_scatter, from, to, count, type, reduction, 0, stream});
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return call("ncclAllGather", comm, {Kind::all_gather, from, to, count, type, ncclSum, 0, stream});
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return call("ncclSend", comm, {Kind::send, from, nullptr, count, type, ncclSum, peer, stream});
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call("ncclRecv", comm, {Kind::receive, nullptr, to, count, type, ncclSum, peer, stream});
}
