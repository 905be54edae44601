#include "common/kernels/cuda/cuda_stream.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <new>
#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/kernels/cuda/libraries.h"
#include "common/kernels/cuda/peer_access.h"

namespace lockstep::cuda {
class CudaStream::Recording final : public Graph {
 public:
  Recording(GraphExecHandle exec, CudaStream& stream, std::vector<Released> released)
      : exec_(std::move(exec)), stream_(stream), released_(std::move(released)) {}
  ~Recording() override {  // launches may still be queued: the stream frees after them
    for (const auto& [memory, bytes] : released_) stream_.release(memory, bytes);
  }
  cudaGraphExec_t exec() const { return exec_.get(); }
  const CudaStream& stream() const { return stream_; }

 private:
  GraphExecHandle exec_;  // CUDA keeps it until queued launches have run
  CudaStream& stream_;
  std::vector<Released> released_;
};

CudaStream::CudaStream(Device& device, std::string name, int index, cudaMemPool_t pool,
                       DeviceState& state)
    : StreamBackend(device, std::move(name)),
      index_(index),
      pool_(pool),
      device_state_(state),
      timing_events_(std::make_shared<TimingEvents>(device.name())) {
  make_current();
  cudaStream_t raw = nullptr;
  check(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), "cudaStreamCreate", device.name());
  raw_.reset(raw);
  check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, index_),
        "cudaDeviceGetAttribute", device.name());
  if (device.options().trace) {
    spans_ = std::make_unique<SpanRecorder>(raw, device.name(), timing_events_);
  }
  block_counters_ = std::make_unique<Buffer>(Stream(*this), kBlockCounters * sizeof(unsigned));
  check(cudaMemsetAsync(block_counters_->data(), 0, block_counters_->bytes(), raw),
        "cudaMemsetAsync", device.name());
}

CudaStream::~CudaStream() {
  cudaSetDevice(index_);
  if (capturing_) {  // an exception left the captured work
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(raw_.get(), &graph);
    GraphHandle unfinished(graph);
    capturing_ = false;
    free_released();
  }
  libraries_.reset();
  scratch_.clear();
  block_counters_.reset();
  cudaStreamSynchronize(raw_.get());
}

/// The current device belongs to the calling thread, and one thread may drive several GPUs: every
/// call says which GPU it means.
void CudaStream::make_current() const {
  check(cudaSetDevice(index_), "cudaSetDevice", device().name());
}

// --- Errors ------------------------------------------------------------------------------------

/// Keeps the stream's first error, as a CPU stream does: it is thrown when the host waits.
void CudaStream::note(cudaError_t status, const char* call) const {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const std::lock_guard lock(mutex_);
  if (error_) return;
  error_ = std::make_exception_ptr(DeviceError(
      fmt::format("{}, stream {}: {}", device().name(), name(), describe(status, call))));
}

std::exception_ptr CudaStream::error() const {
  const std::lock_guard lock(mutex_);
  return error_ ? error_ : device_state_.error();
}

// --- Operations --------------------------------------------------------------------------------

/// Keeps the host at most some hundred operations ahead. A queue that is full blocks the host in
/// the driver: perhaps within a call of NCCL's, which then looks like one that a peer holds up.
void CudaStream::keep_close() {
  if (capturing_ || ++enqueued_ < kClose) return;
  enqueued_ = 0;
  const uint64_t before = std::exchange(milestones_[1], std::exchange(milestones_[0], record()));
  if (before > 0) block(before);
}

bool CudaStream::begin(const char* op) {
  if (error()) return false;
  keep_close();
  if (error()) return false;  // of what the host waited for
  make_current();
  if (spans_ && !capturing_) spans_->begin(op, scope());
  return true;
}

void CudaStream::end(const char* op) {
  // A kernel launch returns nothing itself.
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    note(status, fmt::format("launch of {}", op).c_str());
  }
  if (spans_ && !capturing_) spans_->end();
}

void CudaStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  enqueue("copy", [&](cudaStream_t raw) {
    const auto [status, call] = copy_between(to, from, bytes, index_, raw);
    note(status, call);
  });
}

void CudaStream::host_task(const char* op, std::function<void()> body) {
  refuse_in_capture(op);
  enqueue(op, [&](cudaStream_t raw) {
    while (!host_tasks_.empty() && host_tasks_.front().ended.load(std::memory_order_acquire)) {
      host_tasks_.pop_front();
    }
    HostTask& task = host_tasks_.emplace_back(std::move(body), device_state_);
    const cudaError_t status = cudaLaunchHostFunc(raw, run_host_task, &task);
    if (status != cudaSuccess) host_tasks_.pop_back();
    note(status, "cudaLaunchHostFunc");
  });
}

/// A thread of CUDA calls this: no exception may reach it, and CUDA calls are forbidden there, so
/// the body is destroyed here. It is not run once the device has failed.
void CudaStream::run_host_task(void* launched) {
  HostTask& task = *static_cast<HostTask*>(launched);
  try {
    if (!task.state.error()) task.body();
  } catch (...) {
    task.state.fail(std::current_exception());
  }
  task.body = nullptr;
  task.ended.store(true, std::memory_order_release);
}

int64_t CudaStream::side_by_side(const void* kernel, int threads) const {
  const int each = device_state_.blocks_each(kernel, [&] {
    int found = 0;
    note(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, 0),
         "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return std::max(found, 1);
  });
  return int64_t{multiprocessors_} * each;
}

Libraries& CudaStream::libraries() {
  if (!libraries_) {
    make_current();
    libraries_ = std::make_unique<Libraries>(*this, raw_.get());
  }
  return *libraries_;
}

void CudaStream::push_scope(std::string_view name) {
  StreamBackend::push_scope(name);
  nvtxRangePushA(std::string(name).c_str());
}

void CudaStream::pop_scope() {
  StreamBackend::pop_scope();
  nvtxRangePop();
}

std::vector<Span> CudaStream::timeline() const {
  if (!spans_) return {};
  make_current();
  return spans_->spans();
}

std::vector<MemoryChange> CudaStream::memory_changes() const {
  if (!spans_) return {};
  make_current();
  return spans_->memory_changes();
}

// --- Events ------------------------------------------------------------------------------------

uint64_t CudaStream::record() {
  refuse_in_capture("record");
  make_current();
  const uint64_t ticket = new_ticket();
  note(cudaEventRecord(free_slot(ticket), raw_.get()), "cudaEventRecord");
  return ticket;
}

/// The event to be recorded for the ticket. Waits for the one that it was before.
cudaEvent_t CudaStream::free_slot(uint64_t ticket) {
  EventHandle& slot = events_[ticket % kEventRing];
  if (slot) {
    block(ticket - kEventRing);
    return slot.get();
  }
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreate",
        device().name());
  slot.reset(made);
  return made;
}

struct CudaStream::Time final : EventTime {
  Time(const CudaStream& of, TimingEvents::Owned recorded)
      : stream(of), event(std::move(recorded)) {}
  double seconds_since(const EventTime& earlier) const override {
    const cudaEvent_t first = static_cast<const Time&>(earlier).event.get();
    float milliseconds = 0;
    stream.note(cudaEventElapsedTime(&milliseconds, first, event.get()), "cudaEventElapsedTime");
    return double(milliseconds) * 1e-3;
  }
  const CudaStream& stream;
  TimingEvents::Owned event;
};

std::shared_ptr<const EventTime> CudaStream::record_time() {
  refuse_in_capture("record");
  make_current();
  const auto time = std::make_shared<Time>(*this, timing_events_->take());
  note(cudaEventRecord(time->event.get(), raw_.get()), "cudaEventRecord");
  return time;
}

void CudaStream::wait(const Event& event) {
  refuse_in_capture("wait");
  const CudaStream& source = static_cast<const CudaStream&>(stream_of(event));
  if (&source == this) return;
  make_current();
  const uint64_t ticket = ticket_of(event);
  if (ticket > source.completed_.load()) {  // else its slot may hold a later event by now
    note(cudaStreamWaitEvent(raw_.get(), source.event(ticket), 0), "cudaStreamWaitEvent");
  }
  if (std::exception_ptr error = source.error()) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = failure_of(source, error);
  }
}

void CudaStream::note_completed(uint64_t ticket) const {
  uint64_t known = completed_.load();
  while (known < ticket && !completed_.compare_exchange_weak(known, ticket)) {
  }
}

bool CudaStream::done(uint64_t ticket) const {
  if (ticket <= completed_.load()) return true;
  const cudaError_t status = cudaEventQuery(event(ticket));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();  // not an error, but CUDA would keep it as one
    // Another thread may have put a later event into its slot meanwhile.
    return ticket <= completed_.load();
  }
  note(status, "cudaEventQuery");
  note_completed(ticket);
  return true;
}

void CudaStream::block(uint64_t ticket) const {
  if (ticket <= completed_.load()) return;
  note(cudaEventSynchronize(event(ticket)), "cudaEventSynchronize");
  note_completed(ticket);
}

// --- Graphs: work that is captured instead of run, then launched again and again -----------------

void CudaStream::begin_capture() {
  require(!capturing_, "{}: stream {} is being captured already", device().name(), name());
  record();
  check(cudaStreamBeginCapture(raw_.get(), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture",
        device().name());
  capturing_ = captured_ = true;
}

std::unique_ptr<Graph> CudaStream::end_capture() try {
  require(capturing_, "{}: stream {} is not being captured", device().name(), name());
  capturing_ = false;
  cudaGraph_t captured = nullptr;
  const cudaError_t status = cudaStreamEndCapture(raw_.get(), &captured);
  const GraphHandle graph(captured);
  if (std::exception_ptr first = error()) std::rethrow_exception(first);  // it gives more detail
  check(status, "cudaStreamEndCapture", device().name());
  cudaGraphExec_t exec = nullptr;
  check(cudaGraphInstantiate(&exec, captured, 0), "cudaGraphInstantiate", device().name());
  return std::make_unique<Recording>(GraphExecHandle(exec), *this, std::exchange(released_, {}));
} catch (...) {
  free_released();
  throw;
}

void CudaStream::launch(Graph& graph) {
  const Recording& recorded = dynamic_cast<Recording&>(graph);
  require(&recorded.stream() == this, "{}: stream {} did not record this graph, {} did",
          device().name(), name(), recorded.stream().name());
  enqueue("graph", [&](cudaStream_t raw) {
    note(cudaGraphLaunch(recorded.exec(), raw), "cudaGraphLaunch");
  });
}

// --- Memory ------------------------------------------------------------------------------------

void* CudaStream::allocate(size_t bytes) {
  make_current();
  // Memory that a graph allocates itself would be gone after each launch. During a capture memory
  // comes from the host's own call instead, which CUDA allows beside a relaxed capture.
  void* memory = nullptr;
  cudaError_t status = cudaSuccess;
  if (capturing_) {
    StreamHandle aside;
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate",
          device().name());
    aside.reset(made);
    status = cudaMallocFromPoolAsync(&memory, bytes, pool_, made);
    if (status == cudaSuccess) status = cudaStreamSynchronize(made);
  } else {
    status = cudaMallocFromPoolAsync(&memory, bytes, pool_, raw_.get());
  }
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw std::bad_alloc();
  }
  check(status, "cudaMallocFromPoolAsync", device().name());
  trace_memory(int64_t(bytes));
  return memory;
}

/// A destructor's exception would end the process, and an error within a capture comes to some.
void CudaStream::release(void* memory, size_t bytes) {
  capturing_ ? released_.push_back({memory, bytes}) : free(memory, bytes);
}

void CudaStream::free(void* memory, size_t bytes) noexcept {
  note(cudaSetDevice(index_), "cudaSetDevice");
  note(cudaFreeAsync(memory, raw_.get()), "cudaFreeAsync");
  trace_memory(-int64_t(bytes));
}

void CudaStream::free_released() noexcept {
  for (const auto& [memory, bytes] : std::exchange(released_, {})) free(memory, bytes);
}

/// No exception: destructors come here. Memory of a capture comes aside of the stream, at once.
void CudaStream::trace_memory(int64_t change) noexcept {
  if (!spans_) return;
  try {
    capturing_ ? spans_->memory_at_once(change) : spans_->memory(change);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void* CudaStream::scratch(size_t bytes) {
  if (bytes == 0) return nullptr;
  if (scratch_.empty() || scratch_.back()->bytes() < bytes) {
    // A captured graph continues to use the memory it was captured with.
    if (!captured_) scratch_.clear();
    scratch_.push_back(std::make_unique<Buffer>(Stream(*this), bytes));
  }
  return scratch_.back()->data();
}

}  // namespace lockstep::cuda
