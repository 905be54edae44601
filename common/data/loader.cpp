#include "common/data/loader.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <system_error>
#include <utility>

#include "common/core/error.h"
#include "common/core/host.h"

namespace lockstep {

// --- Batches -------------------------------------------------------------------------------------

std::shared_ptr<void> allocate_host(size_t bytes) {
  return {allocate_aligned(bytes), release_aligned};
}

/// Memory of one batch. Belongs to the pool; used by one maker, then by one batch at a time.
struct BatchBuffer {
  std::shared_ptr<void> memory;
  uint8_t* images = nullptr;
  int32_t* labels = nullptr;
};

/// A fixed number of equal buffers. All members may be called from any thread.
class BatchPool {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// Allocates everything at once: `buffers` buffers of `samples` images of `image_bytes` bytes
  /// each, with their labels.
  BatchPool(int64_t buffers, int64_t samples, int64_t image_bytes, const HostAllocator& allocate);

  /// A free buffer, to be filled; there always is a free one while the loader keeps to its bounds.
  BatchBuffer* take();
  /// Returns a buffer that was taken and has not become a batch.
  void put_back(BatchBuffer* buffer);

  /// The buffer is a batch in the consumer's hands until the last owner of the returned pointer is
  /// gone. The pointer owns a share of the pool, too.
  static std::shared_ptr<BatchBuffer> lend(const std::shared_ptr<BatchPool>& pool,
                                           BatchBuffer* buffer);
  /// Waits until the consumer holds fewer than `limit` batches; false when `deadline` passes first.
  bool wait_lent_below(int64_t limit, TimePoint deadline);

  int64_t lent() const;

 private:
  void reclaim(BatchBuffer* buffer);

  std::vector<BatchBuffer> buffers_;
  mutable std::mutex mutex_;
  std::condition_variable reclaimed_;
  std::vector<BatchBuffer*> free_;
  int64_t lent_ = 0;
};

BatchPool::BatchPool(int64_t buffers, int64_t samples, int64_t image_bytes,
                     const HostAllocator& allocate)
    : buffers_(static_cast<size_t>(buffers)) {
  constexpr size_t kAlignment = 64;  // of the labels, too
  const size_t images =
      (static_cast<size_t>(samples * image_bytes) + kAlignment - 1) / kAlignment * kAlignment;
  const size_t labels = static_cast<size_t>(samples) * sizeof(int32_t);
  free_.reserve(buffers_.size());
  for (BatchBuffer& buffer : buffers_) {
    buffer.memory = allocate(images + labels);
    buffer.images = static_cast<uint8_t*>(buffer.memory.get());
    buffer.labels = reinterpret_cast<int32_t*>(buffer.images + images);
    free_.push_back(&buffer);
  }
}

BatchBuffer* BatchPool::take() {
  std::lock_guard lock(mutex_);
  require(!free_.empty(), "batch pool: all {} buffers are in use, expected a free one",
          buffers_.size());
  BatchBuffer* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void BatchPool::put_back(BatchBuffer* buffer) {
  std::lock_guard lock(mutex_);
  free_.push_back(buffer);
}

std::shared_ptr<BatchBuffer> BatchPool::lend(const std::shared_ptr<BatchPool>& pool,
                                             BatchBuffer* buffer) {
  std::lock_guard lock(pool->mutex_);
  ++pool->lent_;
  return {buffer, [pool](BatchBuffer* back) { pool->reclaim(back); }};
}

void BatchPool::reclaim(BatchBuffer* buffer) {
  std::lock_guard lock(mutex_);
  free_.push_back(buffer);
  --lent_;
  reclaimed_.notify_all();
}

bool BatchPool::wait_lent_below(int64_t limit, TimePoint deadline) {
  std::unique_lock lock(mutex_);
  return reclaimed_.wait_until(lock, deadline, [&] { return lent_ < limit; });
}

int64_t BatchPool::lent() const {
  std::lock_guard lock(mutex_);
  return lent_;
}

// --- Options -------------------------------------------------------------------------------------

namespace {

constexpr int kDefaultPrefetchFactor = 2;
constexpr double kHeldTooLongSeconds = 60;
constexpr double kLongestWaitSeconds = 1e8;  // three years; more would overflow the clock's count

using Clock = std::chrono::steady_clock;

Clock::time_point deadline_after(double seconds) {
  const std::chrono::duration<double> wait(std::min(seconds, kLongestWaitSeconds));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
}

DataLoaderOptions validated(DataLoaderOptions options) {
  options.validate();
  return options;
}

std::shared_ptr<EpochOrder> order_of(const DataLoaderOptions& options, int64_t samples) {
  if (options.sampler != nullptr) return options.sampler;
  return make_order(options.shuffle ? OrderKind::loader : OrderKind::file, samples, options.seed);
}

int64_t count_batches(int64_t samples, int64_t batch_size, bool drop_last) {
  const int64_t batches =
      drop_last ? samples / batch_size : samples / batch_size + (samples % batch_size != 0);
  require(batches > 0,
          "loader: 0 batches: {} samples make no batch of {}{}; give a smaller batch size or more "
          "samples",
          samples, batch_size, drop_last ? " (a short one is dropped)" : "");
  return batches;
}

}  // namespace

void DataLoaderOptions::validate() const {
  require(batch_size > 0, "loader: batch_size is {}, expected 1 or more", batch_size);
  require(num_workers >= 0, "loader: num_workers is {}, expected 0 or more", num_workers);
  require(timeout_seconds >= 0 && std::isfinite(timeout_seconds),
          "loader: timeout is {} s, expected 0 (wait for ever) or more", timeout_seconds);
  require(num_workers > 0 || timeout_seconds == 0,
          "loader: timeout of {} s with num_workers 0: only a worker can be waited for",
          timeout_seconds);
  require(num_workers > 0 || !prefetch_factor,
          "loader: prefetch_factor {} with num_workers 0: only workers prefetch",
          prefetch_factor.value_or(0));
  require(!prefetch_factor || *prefetch_factor > 0,
          "loader: prefetch_factor is {}, expected 1 or more", prefetch_factor.value_or(0));
  require(num_workers > 0 || !persistent_workers,
          "loader: persistent_workers is true with num_workers 0: there is none to keep");
  require(sampler == nullptr || !shuffle,
          "loader: shuffle is true and a sampler is given, expected one of them");
  require(max_held > 0, "loader: max_held is {}, expected 1 or more", max_held);
}

DataLoader::DataLoader(const ImageSource& source, DataLoaderOptions options)
    : source_(source),
      options_(validated(std::move(options))),
      order_(order_of(options_, source.count())),
      batch_size_(options_.batch_size),
      batches_(count_batches(order_->size(), batch_size_, options_.drop_last)),
      window_(int64_t{options_.prefetch_factor.value_or(kDefaultPrefetchFactor)} *
              options_.num_workers),
      turn_(static_cast<size_t>(options_.num_workers)),
      made_(static_cast<size_t>(window_)) {
  const int64_t samples = std::min(batch_size_, order_->size());
  pool_ = std::make_shared<BatchPool>(window_ + options_.max_held, samples, source_.image_bytes(),
                                      options_.allocator);
}

DataLoader::~DataLoader() { stop_workers(); }

int64_t DataLoader::most_in_flight() const {
  std::lock_guard lock(mutex_);
  return most_in_flight_;
}

// --- Making a batch ----------------------------------------------------------------------------

int64_t DataLoader::size_of(int64_t batch) const {
  return std::min(batch_size_, order_->size() - batch * batch_size_);
}

void DataLoader::fill(int64_t batch, BatchBuffer& buffer) const {
  const int64_t first = batch * batch_size_;
  for (int64_t i = 0; i < size_of(batch); ++i) {
    if (cancelled_.load(std::memory_order_relaxed)) return;  // nobody will look at this batch
    source_.read(positions_[static_cast<size_t>(first + i)],
                 buffer.images + i * source_.image_bytes(), buffer.labels + i);
  }
}

DataLoader::Made DataLoader::make(int64_t batch) noexcept {
  Made made;
  made.ready = true;
  try {
    made.buffer = pool_->take();
    fill(batch, *made.buffer);
  } catch (...) {
    made.error = std::current_exception();
  }
  return made;
}

// --- Workers -----------------------------------------------------------------------------------

void DataLoader::work(int worker) {
  int64_t epochs_seen = 0;
  while (wait_for_epoch(worker, epochs_seen)) {
    for (int64_t batch = first_batch_of(worker); batch < batches_ && wait_for_turn(worker, batch);
         batch += options_.num_workers)
      hand_over(batch, make(batch));
    std::lock_guard lock(mutex_);
    if (--workers_busy_ == 0) workers_idle_.notify_one();
  }
}

int64_t DataLoader::first_batch_of(int worker) const {
  const int64_t workers = options_.num_workers;
  const int64_t ahead = (worker - first_batch_ % workers + workers) % workers;
  return first_batch_ + ahead;
}

bool DataLoader::wait_for_epoch(int worker, int64_t& epochs_seen) {
  std::unique_lock lock(mutex_);
  turn_[static_cast<size_t>(worker)].wait(lock,
                                          [&] { return quit_ || epochs_begun_ > epochs_seen; });
  epochs_seen = epochs_begun_;
  return !quit_;
}

bool DataLoader::wait_for_turn(int worker, int64_t batch) {
  // [task 01.3] prefetch bound
  std::unique_lock lock(mutex_);
  turn_[static_cast<size_t>(worker)].wait(
      lock, [&] { return cancelled_ || batch < next_batch_ + window_; });
  if (cancelled_) return false;
  most_in_flight_ = std::max(most_in_flight_, ++in_flight_);
  return true;
  // [end 01.3]
}

void DataLoader::hand_over(int64_t batch, Made made) {
  std::lock_guard lock(mutex_);
  made_[static_cast<size_t>(batch % window_)] = std::move(made);
  if (batch == next_batch_) batch_ready_.notify_one();
}

void DataLoader::start_workers() {
  if (!workers_.empty()) return;
  quit_ = false;
  try {
    for (int k = 0; k < options_.num_workers; ++k) workers_.emplace_back([this, k] { work(k); });
  } catch (const std::system_error& e) {
    const size_t started = workers_.size();
    stop_workers();
    workers_busy_ = 0;
    fail<EnvironmentError>("loader: cannot start worker {} of {}: {}{}; give fewer workers",
                           started, options_.num_workers, e.what(), memory_limit_note().data());
  }
}

void DataLoader::stop_workers() {
  {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    quit_ = true;
    for (std::condition_variable& turn : turn_) turn.notify_one();
  }
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

// --- The consumer --------------------------------------------------------------------------------

void DataLoader::begin_epoch(int64_t epoch, int64_t first_batch) {
  require(first_batch >= 0 && first_batch <= batches_,
          "loader: first batch {} of an epoch, expected 0 to {}", first_batch, batches_);
  end_epoch();
  epoch_ = -1;
  positions_ = order_->order_of_epoch(epoch);
  check_positions();
  epoch_ = epoch;
  {
    std::lock_guard lock(mutex_);
    first_batch_ = next_batch_ = first_batch;
    workers_busy_ = options_.num_workers;
    cancelled_ = false;
    ++epochs_begun_;
    for (std::condition_variable& turn : turn_) turn.notify_one();
  }
  start_workers();
}

void DataLoader::check_positions() const {
  require(std::ssize(positions_) == order_->size(),
          "loader: the order of an epoch has {} positions, expected {}", positions_.size(),
          order_->size());
  for (const int64_t index : positions_)
    require(index >= 0 && index < source_.count(),
            "loader: the order asks for sample {}, expected 0 to {}", index, source_.count() - 1);
}

void DataLoader::end_epoch() {
  std::unique_lock lock(mutex_);
  cancelled_ = true;
  for (std::condition_variable& turn : turn_) turn.notify_one();
  workers_idle_.wait(lock, [&] { return workers_busy_ == 0; });
  for (Made& made : made_) {
    if (made.buffer != nullptr) pool_->put_back(made.buffer);
    made = {};
  }
  in_flight_ = 0;
  lock.unlock();
  if (!options_.persistent_workers) stop_workers();
}

std::optional<HostBatch> DataLoader::next() {
  require(epoch_ >= 0, "loader: next() outside an epoch; call begin_epoch() first");
  const int64_t batch = next_batch_;
  if (batch == batches_) {
    end_epoch();
    return std::nullopt;
  }
  wait_for_room();
  Made made = options_.num_workers > 0 ? wait_for_batch() : make(next_batch_++);
  if (made.error) abandon_epoch(batch, made);
  return HostBatch{.index = batch,
                   .size = size_of(batch),
                   .images = made.buffer->images,
                   .labels = made.buffer->labels,
                   .global_size = size_of(batch),
                   .memory = BatchPool::lend(pool_, made.buffer)};
}

void DataLoader::wait_for_room() {
  const double seconds =
      options_.timeout_seconds > 0 ? options_.timeout_seconds : kHeldTooLongSeconds;
  if (pool_->wait_lent_below(options_.max_held, deadline_after(seconds))) return;
  fail<EnvironmentError>(
      "loader: the consumer holds {} batches for more than {} s and asks for another; drop one "
      "first or raise max_held ({})",
      pool_->lent(), seconds, options_.max_held);
}

DataLoader::Made DataLoader::wait_for_batch() {
  std::unique_lock lock(mutex_);
  Made& slot = made_[static_cast<size_t>(next_batch_ % window_)];
  const auto ready = [&] { return slot.ready; };
  const double seconds = options_.timeout_seconds;
  if (seconds == 0)
    batch_ready_.wait(lock, ready);
  else if (!batch_ready_.wait_until(lock, deadline_after(seconds), ready))
    fail<EnvironmentError>(
        "loader: batch {} of epoch {} did not come from worker {} within {} s; its source hangs or "
        "the timeout is too short",
        next_batch_, epoch_, next_batch_ % options_.num_workers, seconds);
  // The batch that may be begun now, next_batch_ + window_, belongs to the same worker.
  turn_[static_cast<size_t>(next_batch_ % options_.num_workers)].notify_one();
  ++next_batch_;
  --in_flight_;
  return std::exchange(slot, {});
}

void DataLoader::abandon_epoch(int64_t batch, const Made& made) {
  if (made.buffer != nullptr) pool_->put_back(made.buffer);
  epoch_ = -1;
  end_epoch();
  stop_workers();
  if (options_.num_workers == 0) std::rethrow_exception(made.error);
  within(fmt::format("loader worker {}", batch % options_.num_workers),
         [&] { std::rethrow_exception(made.error); });
}

}  // namespace lockstep
