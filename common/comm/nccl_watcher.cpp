#include "common/comm/nccl_watcher.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "common/core/error.h"
#include "common/core/stream_backend.h"

namespace lockstep {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
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
    : timeout_seconds_(timeout_seconds),
      check_nccl_(std::move(check_nccl)),
      thread_([this, gpu] { run(gpu); }) {}

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

/// Without a GPU of its own a thread would begin to use the first one, for its questions alone.
void NcclWatcher::run(int gpu) {
  cudaSetDevice(gpu);
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kBetweenLooks, [this] { return stop_; })) look();
}

void NcclWatcher::look() {
  forget_finished();
  if (late_ && is_too_long(entered_)) end_process(late_());
  if (calls_.empty()) return;
  ask_nccl();
  find_silence();
}

void NcclWatcher::forget_finished() {
  const auto runs = [](NcclCall& call) { return !call.note(); };
  calls_.erase(calls_.begin(), std::find_if(calls_.begin(), calls_.end(), runs));
}

/// One thread at a time may use a communicator.
void NcclWatcher::ask_nccl() {
  if (late_) return;
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
  for (NcclCall& call : calls_) call.flight.give_up();
  throw PeerLost(why);
}

}  // namespace lockstep
