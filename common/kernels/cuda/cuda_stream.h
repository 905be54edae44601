#pragma once
// The stream of a GPU: a cudaStream_t with the interface that CPU devices implement with a thread.

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/core/stream_backend.h"
#include "common/core/tensor.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/cuda/timing.h"

namespace lockstep::cuda {

class Libraries;

/// The state that the streams of one GPU share, apart from the GPU itself.
///
/// Host tasks and libraries can fail without the GPU noticing. Work already given to the GPU is not
/// taken back then: streams that wait for the failed work continue with whatever it left. So a
/// failure concerns all streams of the device, as the error of a kernel does, and each stream
/// reports it.
class DeviceState {
 public:
  /// The first failure, or null.
  std::exception_ptr error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }

  /// True the first time that `text` is given: a text about all streams is printed once.
  bool is_new(const std::string& text) {
    const std::lock_guard lock(mutex_);
    return said_.insert(text).second;
  }

  /// The result of found() for a kernel, kept from the first call. The mutex is free during this
  /// call: CUDA may load the kernel, and wait for host tasks.
  template <class Found>
  int blocks_each(const void* kernel, Found found) {
    {
      const std::lock_guard lock(mutex_);
      const auto known = blocks_each_.find(kernel);
      if (known != blocks_each_.end()) return known->second;
    }
    const int blocks = found();
    const std::lock_guard lock(mutex_);
    return blocks_each_.try_emplace(kernel, blocks).first->second;
  }

 private:
  mutable std::mutex mutex_;  // between CUDA's thread and all that ask
  std::exception_ptr error_;
  std::set<std::string> said_;
  std::unordered_map<const void*, int> blocks_each_;  // per multiprocessor, by kernel
};

class CudaStream final : public StreamBackend {
 public:
  /// `index` is the GPU's number, `pool` gives its memory, `state` is the device's.
  CudaStream(Device& device, std::string name, int index, cudaMemPool_t pool, DeviceState& state);
  /// Waits for what is queued.
  ~CudaStream() override;

  /// Enqueues one operation named `op` (a literal) by calling launch(cudaStream_t), on this
  /// stream's GPU. Does nothing once the stream has failed.
  template <class F>
  void enqueue(const char* op, F launch) {
    if (!begin(op)) return;
    launch(raw_.get());
    end(op);
  }
  /// Scratch memory for the operation about to be enqueued: at least `bytes`, contents undefined,
  /// counted on the device. The next operation may overwrite it.
  void* scratch(size_t bytes);
  /// kBlockCounters counters that are zero before and after every operation (see reduce_rows).
  unsigned* block_counters() const { return static_cast<unsigned*>(block_counters_->data()); }
  static constexpr int kBlockCounters = 1024;
  /// cuBLAS and cuDNN on this stream.
  Libraries& libraries();
  /// The number of blocks of this kernel, of so many threads each, that run on the GPU at one time.
  /// The more registers a thread has, the fewer blocks. Call it within enqueue().
  int64_t side_by_side(const void* kernel, int threads) const;
  /// For libraries that enqueue by themselves. Use it within enqueue().
  cudaStream_t raw() const { return raw_.get(); }
  /// The state that all streams of the device share.
  DeviceState& device_state() const { return device_state_; }

  uint64_t record() override;
  std::shared_ptr<const EventTime> record_time() override;
  void wait(const Event& event) override;
  void copy(void* to, const void* from, size_t bytes) override;
  void host_task(const char* op, std::function<void()> body) override;
  void* allocate(size_t bytes) override;
  void release(void* memory, size_t bytes) override;
  void begin_capture() override;
  std::unique_ptr<Graph> end_capture() override;
  void launch(Graph& graph) override;
  bool done(uint64_t ticket) const override;
  void block(uint64_t ticket) const override;
  std::exception_ptr error() const override;
  void push_scope(std::string_view name) override;
  void pop_scope() override;
  std::vector<Span> timeline() const override;
  std::vector<MemoryChange> memory_changes() const override;

 private:
  // Events are kept in a ring, as in CpuStream. A slot is recorded anew only when its event is
  // done: whoever asks for that event, or waits for it, must not be told of a later one, which may
  // wait for a rank that does not come. completed_ keeps what was already seen done.

  struct Time;      // of an event
  class Recording;  // a Graph
  struct Released {
    void* memory;
    size_t bytes;
  };
  struct HostTask {
    HostTask(std::function<void()> body, DeviceState& state)
        : body(std::move(body)), state(state) {}
    std::function<void()> body;
    DeviceState& state;
    std::atomic<bool> ended{false};
  };

  static void run_host_task(void* task);
  void make_current() const;
  bool begin(const char* op);
  void keep_close();
  cudaEvent_t free_slot(uint64_t ticket);
  void end(const char* op);
  bool is_capturing() const override { return capturing_; }
  void note(cudaError_t status, const char* call) const;
  void free(void* memory, size_t bytes) noexcept;
  void free_released() noexcept;
  void trace_memory(int64_t change) noexcept;
  void note_completed(uint64_t ticket) const;
  cudaEvent_t event(uint64_t ticket) const { return events_[ticket % kEventRing].get(); }

  const int index_;
  const cudaMemPool_t pool_;
  DeviceState& device_state_;
  int multiprocessors_ = 1;
  StreamHandle raw_;
  std::array<EventHandle, kEventRing> events_;
  const std::shared_ptr<TimingEvents> timing_events_;
  mutable std::atomic<uint64_t> completed_{0};  // the latest ticket known to be done
  static constexpr int kClose = 256;
  int enqueued_ = 0;                      // since the last of these:
  std::array<uint64_t, 2> milestones_{};  // tickets of kClose operations ago, and of twice as many
  bool capturing_ = false;
  bool captured_ = false;           // graphs exist that know the address of the scratch memory
  std::vector<Released> released_;  // during this capture

  mutable std::mutex mutex_;  // an event may be waited for by any thread
  mutable std::exception_ptr error_;

  std::unique_ptr<SpanRecorder> spans_;  // null unless tracing

  std::deque<HostTask> host_tasks_;  // in order; CUDA does not call those after the GPU's error
  std::unique_ptr<Buffer> block_counters_;
  std::vector<std::unique_ptr<Buffer>> scratch_;  // the last is the largest and in use
  std::unique_ptr<Libraries> libraries_;          // destroyed first: it uses all of the above
};

inline CudaStream& cuda_stream(Stream stream) { return static_cast<CudaStream&>(stream.backend()); }

}  // namespace lockstep::cuda
