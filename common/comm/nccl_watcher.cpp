#include "common/comm/nccl_watcher.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <future>
#include <utility>

#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
constexpr auto kLastLook = std::chrono::seconds(1);
/// So many calls in the list: the host forgets finished ones itself. The recorder has 64 places.
constexpr size_t kManyCalls = 32;

}  // namespace

// --- A call --------------------------------------------------------------------------------------

void NcclCall::record_begin() {
  if (flight.is_recorded()) begin = stream.record_time();
  arrived = begin ? begin->event() : stream.record();
}

void NcclCall::record_end() {
  if (flight.is_recorded()) end = stream.record_time();
  finished = end ? end->event() : stream.record();
}

bool NcclCall::has_finished() const { return finished->done() && !stream.backend().error(); }

bool NcclCall::note() {
  const bool ended = has_finished();
  if (!end) return ended;
  if (!flight.has_started() && has_begun()) flight.start();
  if (ended) flight.complete(int64_t(1e9 * end->seconds_since(*begin)));
  return ended;
}

// --- The host's side -----------------------------------------------------------------------------

NcclWatcher::NcclWatcher(int gpu, double timeout_seconds, std::function<void()> check_nccl)
    : gpu_(gpu),
      timeout_seconds_(timeout_seconds),
      check_nccl_(std::move(check_nccl)),
      thread_([this] { run(); }) {}

NcclWatcher::~NcclWatcher() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
  forget_finished();
}

NcclWatcher::Inside::Inside(NcclWatcher& watcher, std::function<std::string()> late)
    : watcher_(watcher) {
  const std::lock_guard lock(watcher_.mutex_);
  watcher_.late_ = std::move(late);
  watcher_.entered_ = Clock::now();
}

NcclWatcher::Inside::~Inside() {
  const std::lock_guard lock(watcher_.mutex_);
  watcher_.late_ = nullptr;
}

void NcclWatcher::add(NcclCall call) {
  const std::lock_guard lock(mutex_);
  if (calls_.size() >= kManyCalls) forget_finished();
  calls_.push_back(std::move(call));
}

void NcclWatcher::give_up() {
  const std::lock_guard lock(mutex_);
  for (NcclCall& call : calls_) call.flight.give_up();
  calls_.clear();
}

// --- The watcher's side --------------------------------------------------------------------------

void NcclWatcher::run() {
  cudaSetDevice(gpu_);  // or the thread would begin to use the first GPU, for its questions alone
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kBetweenLooks, [this] { return stop_; })) look();
}

/// While a call runs, nothing is asked. One thread at a time may use a communicator. And the call
/// may wait in the driver for what runs on the GPU, with a lock that a question of CUDA's needs,
/// too: nobody would see the deadline.
void NcclWatcher::look() {
  if (late_) {
    if (is_too_long(entered_)) end_process(late_());
    return;
  }
  forget_finished();
  if (calls_.empty()) return;
  ask_nccl();
  find_silence();
}

void NcclWatcher::forget_finished() {
  const auto runs = [](NcclCall& call) { return !call.note(); };
  calls_.erase(calls_.begin(), std::find_if(calls_.begin(), calls_.end(), runs));
}

void NcclWatcher::ask_nccl() {
  try {
    check_nccl_();
  } catch (const PeerLost& error) {
    end_process(fmt::format("{}: {}", calls_.front().what, error.what()));
  }
}

/// The time begins when the rank's own stream has come to the oldest call. What keeps a later call
/// waiting is seen when that one is the oldest. A stream that failed tells its host itself.
void NcclWatcher::find_silence() {
  NcclCall& first = calls_.front();
  if (!first.has_begun() || first.stream.backend().error()) return;
  if (!first.came) first.came = Clock::now();
  if (!is_too_long(*first.came)) return;
  end_process(
      fmt::format("{}: no answer from {} within {} s", first.what, first.whom, timeout_seconds_));
}

bool NcclWatcher::is_too_long(Clock::time_point since) const {
  return std::chrono::duration<double>(Clock::now() - since).count() >= timeout_seconds_;
}

void NcclWatcher::end_process(const std::string& why) {
  if (note_last_calls()) {
    for (NcclCall& call : calls_) call.flight.give_up();
  }
  throw PeerLost(why);
}

/// Records what has ended, if CUDA answers soon. If it does not, the thread that asks stays stuck.
bool NcclWatcher::note_last_calls() {
  std::promise<void> noted;
  const std::future<void> soon = noted.get_future();
  std::thread([this, noted = std::move(noted)]() mutable {
    cudaSetDevice(gpu_);
    forget_finished();
    noted.set_value();
  }).detach();
  return soon.wait_for(kLastLook) == std::future_status::ready;
}

}  // namespace lockstep
