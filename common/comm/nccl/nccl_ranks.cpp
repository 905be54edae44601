#include "common/comm/nccl/nccl_ranks.h"

#include <algorithm>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "common/core/error.h"
#include "common/core/listed.h"
#include "common/kernels/cuda/check.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kGraceSeconds = 5;  // for ending and aborting, which hang where a GPU hangs

/// NCCL's texts may have several lines; ours have one.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

/// Calls made while it lives are one operation for NCCL.
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
    // Most waits take microseconds; longer ones are not worth a busy core.
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

ncclUniqueId new_nccl_id() {
  ncclUniqueId id;
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", "NCCL");
  return id;
}

NcclRanks::NcclRanks(NcclMembers members, double deadline_seconds)
    : members_(std::move(members)),
      deadline_seconds_(deadline_seconds),
      comms_(members_.devices.size()) {
  try {
    initialize();
  } catch (...) {
    abort();
    throw;
  }
}

/// One thread calls for all ranks of the process: inside a group, or the first call would wait for
/// the others.
void NcclRanks::initialize() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  NcclGroup group;
  for (size_t i = 0; i < comms_.size(); ++i) {
    const Device& device = *members_.devices[i];
    cuda::check(cudaSetDevice(device.id().index), "cudaSetDevice", device.name());
    check_nccl(ncclCommInitRankConfig(&comms_[i], world_size(), members_.id,
                                      members_.first + static_cast<int>(i), &config),
               "ncclCommInitRankConfig", name_at(i), comms_[i]);
  }
  group.end();
  await_ready("ncclCommInitRankConfig");
}

// --- Life ----------------------------------------------------------------------------------------

std::string NcclRanks::name(int rank) const {
  return fmt::format("rank {} ({})", rank, members_.devices[rank - members_.first]->name());
}

std::string NcclRanks::others() const {
  const int here = static_cast<int>(members_.devices.size()), others = world_size() - here;
  if (others == 0) return "";
  if (others > 1) return fmt::format("one of the other {} ranks", others);
  return fmt::format("rank {}", members_.first == 0 ? here : 0);
}

ncclResult_t NcclRanks::state(size_t index) const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t status = ncclCommGetAsyncError(comms_[index], &state);
  return status == ncclSuccess ? state : status;
}

void NcclRanks::await_ready(const char* call) const {
  std::vector<std::string> unready;
  const bool ready = poll(deadline_seconds_, [&] {
    unready.clear();
    for (size_t i = 0; i < comms_.size(); ++i) {
      const ncclResult_t now = state(i);
      check_nccl(now, call, name_at(i), comms_[i]);
      if (now == ncclInProgress) unready.push_back(name_at(i));
    }
    return unready.empty();
  });
  if (ready) return;
  const std::string missing = others();
  fail<PeerLost>(
      "{}: {} not ready within {} s: {}the ranks do not reach each other; NCCL_DEBUG=INFO "
      "shows where they stop",
      call, listed(unready), deadline_seconds_,
      missing.empty() ? "" : missing + " did not come, or ");
}

void NcclRanks::group(const std::function<void()>& issue) const {
  NcclGroup group;
  issue();
  group.end();
  await_ready("ncclGroupEnd");
}

std::string NcclRanks::failure() const {
  for (size_t i = 0; i < comms_.size(); ++i) {
    try {
      check_nccl(state(i), "ncclCommGetAsyncError", name_at(i), comms_[i]);
    } catch (const PeerLost& error) {
      return error.what();
    }
  }
  return "";
}

// --- Death ---------------------------------------------------------------------------------------

/// Waits for the calls in flight. True when every communicator may be destroyed.
bool NcclRanks::finalize() const {
  try {
    NcclGroup group;  // NCCL asks for it where one thread finalizes several ranks
    for (ncclComm_t comm : comms_)
      check_nccl(ncclCommFinalize(comm), "ncclCommFinalize", "NCCL", comm);
    group.end();
  } catch (const PeerLost&) {
    return false;
  }
  const auto all_are = [this](ncclResult_t wanted) {
    for (size_t i = 0; i < comms_.size(); ++i) {
      if (state(i) != wanted) return false;
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
/// left alone: a process that reports a lost peer ends soon.
void NcclRanks::abort() {
  const auto aborted = std::make_shared<std::promise<void>>();
  std::thread([comms = std::exchange(comms_, {}), aborted] {
    for (ncclComm_t comm : comms) ncclCommAbort(comm);  // nothing for a null pointer
    aborted->set_value();
  }).detach();
  aborted->get_future().wait_for(std::chrono::duration<double>(kGraceSeconds));
}

}  // namespace lockstep
