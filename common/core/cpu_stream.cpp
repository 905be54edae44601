#include "common/core/cpu_stream.h"

#include <omp.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/parse.h"

namespace lockstep {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kPoll = true;  // a futex word would be a second edge between the threads
#else
constexpr bool kPoll = false;
#endif

constexpr int64_t kSpinNs = 50'000;       // waking a halted core costs more than that
constexpr int64_t kLongSpinNs = 400'000;  // a neighbour needs about that for its micro-batch
constexpr int64_t kTakenNs = 5'000;       // a yield that lasts longer let somebody else run
constexpr int kLooks = 16;                // between two yields of the core

/// Returns when `ready()` holds: spins for up to `limit` ns, then sleeps until `signal` moves.
/// Where there are more threads than cores, the awaited thread may need this core: it gets the
/// core, and this one sleeps soon.
template <class Ready>
void spin_then_sleep(std::atomic<int>& signal, int64_t limit, Ready ready) {
  const int64_t begin = steady_ns();
  for (int64_t now = begin; now - begin < limit;) {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return;
      pause_core();
    }
    const int64_t before = steady_ns();
    std::this_thread::yield();
    now = steady_ns();
    if (now - before > kTakenNs) limit = kSpinNs;
  }
  while (true) {
    const int seen = kPoll ? 0 : signal.load(std::memory_order_seq_cst);
    if (ready()) return;
    if (kPoll) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    } else {
      signal.wait(seen);
    }
  }
}

/// Moves `signal` and wakes its sleepers. The read-modify-write is a full barrier: the store that
/// made `ready()` true is visible before the number of sleepers is looked at.
void raise(std::atomic<int>& signal) {
  if (kPoll) return;
  signal.fetch_add(1, std::memory_order_seq_cst);
  signal.notify_all();
}

int chaos_from_environment() {
  const char* text = std::getenv("LOCKSTEP_CHAOS");
  return text == nullptr || *text == '\0' ? 0 : parse_whole(text, "LOCKSTEP_CHAOS", 0, 1'000'000);
}

}  // namespace

struct CpuStream::Recording final : Graph {
  struct Operation {
    const char* op;
    const std::string* scope;
    std::function<void()> body;
  };
  struct Released {
    void* memory;
    size_t bytes;
  };
  explicit Recording(CpuStream& stream) : stream(stream) {}
  ~Recording() override {
    stream.drain();  // launches may still be queued
    for (const auto& [memory, bytes] : released) stream.release(memory, bytes);
  }

  CpuStream& stream;
  std::vector<Operation> operations;
  std::vector<Released> released;  // during the capture; the operations may use it
};

CpuStream::CpuStream(Device& device, std::string name)
    : StreamBackend(device, std::move(name)),
      chaos_us_(chaos_from_environment()),
      last_(new Task),  // an empty node before the first task
      tracing_(device.options().trace),
      spin_ns_(device.options().neighbours > 0 ? kLongSpinNs : kSpinNs),
      // Streams with equal delays would keep their relative order.
      chaos_state_(static_cast<uint32_t>(std::hash<std::string>()(device.name() + this->name()))),
      worker_([this, first = last_] { work(first); }) {}

CpuStream::~CpuStream() {
  recording_.reset();
  enqueue_control("end", nullptr);
  worker_.join();
  block_until_unawaited();
}

void CpuStream::enqueue(const char* op, std::function<void()> body) {
  if (!recording_) return link(op, scope(), std::move(body), /*control=*/false);
  recording_->operations.push_back({op, scope(), std::move(body)});
}

void CpuStream::enqueue_control(const char* op, std::function<void()> body) {
  refuse_in_capture(op);
  link(op, scope(), std::move(body), /*control=*/true);
}

void CpuStream::host_task(const char* op, std::function<void()> body) {
  refuse_in_capture(op);
  link(op, scope(), std::move(body), /*control=*/false);
}

void CpuStream::link(const char* op, const std::string* scope, std::function<void()> body,
                     bool control) {
  Task* task = new Task;
  task->body = std::move(body);
  task->op = op;
  task->scope = scope;
  task->control = control;
  if (tracing_) task->queued_ns = steady_ns();
  Task* previous = std::exchange(last_, task);
  previous->next.store(task, std::memory_order_release);  // from here the worker may free previous
  raise(pushed_);
}

void CpuStream::work(Task* first) {
  thread_.store(::gettid(), std::memory_order_relaxed);
  keep_to(device().options().cores);
  // The number of OpenMP threads is a setting of each thread, and oneDNN reads it when it makes a
  // primitive: it is set before anything else runs here.
  omp_set_num_threads(device().options().threads);
  for (Task* task = first;;) {
    Task* next = nullptr;
    spin_then_sleep(pushed_, spin_ns_, [&] {
      next = task->next.load(std::memory_order_acquire);
      return next != nullptr;
    });
    delete std::exchange(task, next);
    if (!task->body) {
      delete task;
      worker_state_.reset();
      return;
    }
    if (task->control || !failed_.load(std::memory_order_relaxed)) {
      if (chaos_us_ > 0) chaos();
      const int64_t begin = tracing_ ? steady_ns() : 0;
      try {
        task->body();
      } catch (...) {
        fail_with(std::current_exception());
      }
      if (tracing_ && !task->control) {
        spans_.push_back({task->op, task->scope, begin, steady_ns(), task->queued_ns});
      }
    }
    task->body = nullptr;  // captures are freed now, not when the next task comes
  }
}

/// Test switch: a random delay of up to LOCKSTEP_CHAOS microseconds widens every race.
void CpuStream::chaos() {
  chaos_state_ = chaos_state_ * 1664525u + 1013904223u;  // Numerical Recipes' generator
  const int delay = static_cast<int>(chaos_state_ >> 8) % (chaos_us_ + 1);
  std::this_thread::sleep_for(std::chrono::microseconds(delay));
}

void CpuStream::fail_with(std::exception_ptr error) {
  if (failed_.load(std::memory_order_relaxed)) return;  // the first error is the one to report
  error_ = std::move(error);
  failed_.store(true, std::memory_order_release);
}

uint64_t CpuStream::record() {
  refuse_in_capture("record");
  const uint64_t ticket = new_ticket();
  enqueue_control("record", [this, ticket] {
    events_[ticket % kEventRing].store(ticket, std::memory_order_release);
    raise(signals_);
  });
  return ticket;
}

/// The worker writes the time before the event that is recorded after it.
struct CpuStream::Time final : EventTime {
  double seconds_since(const EventTime& earlier) const override {
    return double(ns - static_cast<const Time&>(earlier).ns) * 1e-9;
  }
  std::atomic<int64_t> ns{0};
};

std::shared_ptr<const EventTime> CpuStream::record_time() {
  refuse_in_capture("record");
  const auto time = std::make_shared<Time>();
  enqueue_control("time", [time] { time->ns.store(steady_ns(), std::memory_order_relaxed); });
  return time;
}

void CpuStream::wait(const Event& event) {
  StreamBackend& source = stream_of(event);
  refuse_in_capture("wait");
  if (&source == this) return;  // a stream always runs after its own events
  source.await_begins();
  enqueue_control("wait", [this, &source, ticket = ticket_of(event)] {
    source.block(ticket);
    if (std::exception_ptr error = source.error()) fail_with(failure_of(source, error));
    source.await_ends();  // from here the source may be destroyed
  });
}

void CpuStream::block(uint64_t ticket) const {
  spin_then_sleep(signals_, spin_ns_, [&] { return done(ticket); });
}

std::exception_ptr CpuStream::error() const {
  return failed_.load(std::memory_order_acquire) ? error_ : nullptr;
}

void CpuStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;  // an empty buffer may have a null address, which memcpy must not get
  enqueue("copy", [=] { std::memcpy(to, from, bytes); });
}

void* CpuStream::allocate(size_t bytes) {
  void* const memory = allocate_aligned(bytes);
  trace_memory(int64_t(bytes));
  return memory;
}

void CpuStream::release(void* memory, size_t bytes) {
  if (recording_) return recording_->released.push_back({memory, bytes});
  enqueue_control("free", [=] { release_aligned(memory); });
  trace_memory(-int64_t(bytes));
}

/// The worker notes when it comes to this. Never a part of a graph, whose memory is there before.
void CpuStream::trace_memory(int64_t change) {
  const auto note = [this, change] { memory_changes_.push_back({steady_ns(), change}); };
  if (tracing_) link("memory", nullptr, note, /*control=*/true);
}

void CpuStream::count_workspace(int64_t change) {
  device().memory().add(change);
  device().workspaces().add(change);
  if (tracing_) memory_changes_.push_back({steady_ns(), change});
}

void CpuStream::begin_capture() {
  require(!recording_, "{}: stream {} is being captured already", device().name(), name());
  record();
  recording_ = std::make_unique<Recording>(*this);
}

std::unique_ptr<Graph> CpuStream::end_capture() {
  require(recording_ != nullptr, "{}: stream {} is not being captured", device().name(), name());
  return std::move(recording_);
}

/// A recorded operation runs as if it had been enqueued now: it shows in the trace, and is skipped
/// on a poisoned stream.
void CpuStream::launch(Graph& graph) {
  Recording& recorded = dynamic_cast<Recording&>(graph);
  require(&recorded.stream == this, "{}: stream {} did not record this graph, {} did",
          device().name(), name(), recorded.stream.name());
  for (const Recording::Operation& operation : recorded.operations) {
    const auto run = [body = &operation.body] { (*body)(); };
    link(operation.op, operation.scope, run, false);
  }
}

}  // namespace lockstep
