#include "common/comm/nccl/nccl_ranks.h"

#include <algorithm>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "common/core/error.h"
#include "common/kernels/cuda/check.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kGraceSeconds = 5;  // for ending and aborting, which hang where a GPU hangs

/// NCCL's texts may have several lines, ours have one.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

/// Calls made within its lifetime are one operation of NCCL's.
class NcclGroup {
 public:
  NcclGroup() { check_nccl(ncclGroupStart(), "ncclGroupStart", "NCCL"); }
  ~NcclGroup() {
    if (open_) ncclGroupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  void end() {
    open_ = false;
    check_nccl(ncclGroupEnd(), "ncclGroupEnd", "NCCL");
  }

 private:
  bool open_ = true;
};

}  // namespace

bool poll(double seconds, const std::function<bool()>& ready) {
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration<double>(seconds);
  while (!ready()) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    // Most of what is waited for takes microseconds; what takes longer is not worth a core.
    if (now - begin < std::chrono::milliseconds(1)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return true;
}

void check_nccl(ncclResult_t status, const char* call, const std::string& who, ncclComm_t comm) {
  if (status == ncclSuccess || status == ncclInProgress) return;
  const std::string words = one_line(ncclGetLastError(comm));
  fail<PeerLost>("{}: {}: {}{}{}", who, call, ncclGetErrorString(status), words.empty() ? "" : ": ",
                 words);
}

// --- Birth ---------------------------------------------------------------------------------------

NcclRanks::NcclRanks(const std::vector<Device*>& devices, double deadline_seconds)
    : devices_(devices), deadline_seconds_(deadline_seconds), comms_(devices.size()) {
  try {
    initialize();
  } catch (...) {
    abort();
    throw;
  }
}

/// One thread calls for all ranks: inside a group, or the first call would wait for the others.
void NcclRanks::initialize() {
  ncclUniqueId id;
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", "NCCL");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  NcclGroup group;
  for (int rank = 0; rank < size(); ++rank) {
    cuda::check(cudaSetDevice(devices_[rank]->id().index), "cudaSetDevice", devices_[rank]->name());
    check_nccl(ncclCommInitRankConfig(&comms_[rank], size(), id, rank, &config),
               "ncclCommInitRankConfig", name(rank), comms_[rank]);
  }
  group.end();
  await_ready("ncclCommInitRankConfig");
}

// --- Life ----------------------------------------------------------------------------------------

std::string NcclRanks::name(int rank) const {
  return fmt::format("rank {} ({})", rank, devices_[rank]->name());
}

ncclResult_t NcclRanks::state(int rank) const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t status = ncclCommGetAsyncError(comms_[rank], &state);
  return status == ncclSuccess ? state : status;
}

void NcclRanks::await_ready(const char* call) const {
  std::vector<std::string> unready;
  const bool ready = poll(deadline_seconds_, [&] {
    unready.clear();
    for (int rank = 0; rank < size(); ++rank) {
      const ncclResult_t now = state(rank);
      check_nccl(now, call, name(rank), comms_[rank]);
      if (now == ncclInProgress) unready.push_back(name(rank));
    }
    return unready.empty();
  });
  if (ready) return;
  fail<PeerLost>(
      "{}: {} not ready within {} s: the ranks do not reach each other; NCCL_DEBUG=INFO "
      "shows where they stop",
      call, fmt::join(unready, ", "), deadline_seconds_);
}

void NcclRanks::group(const std::function<void()>& issue) const {
  NcclGroup group;
  issue();
  group.end();
  await_ready("ncclGroupEnd");
}

std::string NcclRanks::failure() const {
  for (int rank = 0; rank < size(); ++rank) {
    try {
      check_nccl(state(rank), "ncclCommGetAsyncError", name(rank), comms_[rank]);
    } catch (const PeerLost& error) {
      return error.what();
    }
  }
  return "";
}

// --- Death ---------------------------------------------------------------------------------------

/// Waits for the calls in flight. True when every communicator may be destroyed.
bool NcclRanks::finalize() const {
  for (ncclComm_t comm : comms_) {
    const ncclResult_t status = ncclCommFinalize(comm);
    if (status != ncclSuccess && status != ncclInProgress) return false;
  }
  const auto all_are = [this](ncclResult_t wanted) {
    for (int rank = 0; rank < size(); ++rank) {
      if (state(rank) != wanted) return false;
    }
    return true;
  };
  return poll(std::min(kGraceSeconds, deadline_seconds_), [&] { return all_are(ncclSuccess); });
}

NcclRanks::~NcclRanks() {
  if (comms_.empty()) return;
  if (finalize()) {
    for (ncclComm_t comm : comms_) ncclCommDestroy(comm);
  } else {
    abort();
  }
}

/// ncclCommAbort frees memory, for which it waits where a GPU is stuck in other work. Then it is
/// left to itself: whoever reports a lost peer ends soon.
void NcclRanks::abort() {
  const auto aborted = std::make_shared<std::promise<void>>();
  std::thread([comms = std::exchange(comms_, {}), aborted] {
    for (ncclComm_t comm : comms) ncclCommAbort(comm);  // nothing for a null pointer
    aborted->set_value();
  }).detach();
  aborted->get_future().wait_for(std::chrono::duration<double>(kGraceSeconds));
}

}  // namespace lockstep
