// The loader: same batches whatever the number of workers, and no fault of a source or a consumer
// makes it hang, leak or lie (rows 10 and 23 to 29 of the test table).

#include "common/data/loader.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "common/core/error.h"
#include "common/data/synthetic.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::Clock;
using testing::message_of;
using testing::seconds_since;

/// ThreadSanitizer has a thread of its own from the first start of one on.
const bool kHasStartedOne = (std::thread([] {}).join(), true);

int64_t threads_of_this_process() {
  using Iterator = std::filesystem::directory_iterator;
  return std::distance(Iterator("/proc/self/task"), Iterator());
}

// A joined thread may stay listed for a moment; one that was not joined stays for good.
bool only_threads_left(int64_t expected) {
  const auto begin = Clock::now();
  while (threads_of_this_process() != expected && seconds_since(begin) < 5)
    std::this_thread::yield();
  return threads_of_this_process() == expected;
}

/// Images of four bytes that are the sample's number; what else read() does is up to `before_read`.
class NumberedSource : public ImageSource {
 public:
  explicit NumberedSource(int64_t count) : count_(count) {}
  int64_t count() const override { return count_; }
  int64_t image_bytes() const override { return 4; }
  void read(int64_t index, uint8_t* image, int32_t* label) const override {
    if (before_read) before_read(index);
    for (int i = 0; i < 4; ++i) image[i] = static_cast<uint8_t>(index >> (8 * i));
    *label = static_cast<int32_t>(index % 10);
  }

  std::function<void(int64_t index)> before_read;

 private:
  int64_t count_;
};

int64_t number_in(const uint8_t* image) {
  return image[0] | image[1] << 8 | image[2] << 16 | int64_t{image[3]} << 24;
}

using Batches = std::vector<std::vector<int64_t>>;

/// Sample numbers of the rest of the epoch, by batch; a batch whose label or number in the epoch
/// is wrong comes out as {-1}.
Batches collect(DataLoader& loader, int64_t first_batch = 0) {
  Batches batches;
  while (const auto batch = loader.next()) {
    const auto index = first_batch + static_cast<int64_t>(batches.size());
    std::vector<int64_t> numbers;
    bool right = batch->index == index;
    for (int64_t i = 0; i < batch->size; ++i) {
      numbers.push_back(number_in(batch->images + 4 * i));
      right = right && batch->labels[i] == numbers.back() % 10;
    }
    batches.push_back(right ? numbers : std::vector<int64_t>{-1});
  }
  return batches;
}

Batches one_epoch(DataLoader& loader, int64_t epoch, int64_t first_batch = 0) {
  loader.begin_epoch(epoch, first_batch);
  return collect(loader, first_batch);
}

TEST_CASE("Any number of workers gives the same batches in the same order", "[loader][row23]") {
  const NumberedSource source(103);
  const auto order = make_order(OrderKind::loader, 103, 7);
  for (const int workers : {0, 1, 2, 8}) {
    for (const bool persistent : {false, true}) {
      if (workers == 0 && persistent) continue;
      CAPTURE(workers, persistent);
      DataLoader loader(source, {.batch_size = 8,
                                 .shuffle = true,
                                 .num_workers = workers,
                                 .persistent_workers = persistent,
                                 .seed = 7});
      CHECK(loader.batches_per_epoch() == 13);
      for (const int64_t epoch : {0, 1, 2}) {
        const std::vector<int64_t> positions = order->order_of_epoch(epoch);
        Batches expected;
        for (size_t first = 0; first < positions.size(); first += 8) {
          const size_t last = std::min(first + 8, positions.size());
          expected.emplace_back(positions.begin() + first, positions.begin() + last);
        }
        CHECK(one_epoch(loader, epoch) == expected);
        CHECK_FALSE(loader.next().has_value());  // the end stays the end
      }
    }
  }
}

TEST_CASE("Without shuffle samples come as they lie; with a sampler, in its order",
          "[loader][row23]") {
  const NumberedSource source(10);
  DataLoader plain(source, {.batch_size = 4});
  CHECK(one_epoch(plain, 0) == Batches{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}});
  DataLoader sampled(source, {.batch_size = 4, .sampler = make_order(OrderKind::sampler, 10, 0)});
  CHECK(one_epoch(sampled, 0) == Batches{{4, 1, 7, 5}, {3, 9, 0, 8}, {6, 2}});
  CHECK(one_epoch(sampled, 1) == Batches{{5, 6, 1, 2}, {0, 8, 9, 3}, {7, 4}});
  DataLoader golden(source, {.batch_size = 5, .shuffle = true, .num_workers = 2, .seed = 0});
  CHECK(one_epoch(golden, 0) == Batches{{3, 7, 5, 2, 0}, {8, 1, 6, 9, 4}});
}

TEST_CASE("An epoch can begin at any batch, and while another is under way", "[loader]") {
  const NumberedSource source(50);
  for (const int workers : {0, 1, 3}) {
    CAPTURE(workers);
    DataLoader loader(source, {.batch_size = 4,
                               .shuffle = true,
                               .num_workers = workers,
                               .persistent_workers = workers > 1,
                               .seed = 3});
    const Batches whole = one_epoch(loader, 0);
    for (const int64_t first : {1, 5, 12, 13}) {
      CHECK(one_epoch(loader, 0, first) == Batches(whole.begin() + first, whole.end()));
      loader.begin_epoch(0, 2);
      const auto kept = loader.next();  // held while the epoch is given up
      loader.begin_epoch(1);
      CHECK(number_in(kept->images) == whole[2][0]);
    }
    CHECK_THROWS_WITH(loader.begin_epoch(0, 14), ContainsSubstring("expected 0 to 13"));
  }
}

TEST_CASE("Worker k makes the batches b with b mod n = k, wherever the epoch begins", "[loader]") {
  NumberedSource source(60);
  std::mutex mutex;
  std::vector<std::thread::id> maker(60);
  source.before_read = [&](int64_t index) {
    std::lock_guard lock(mutex);
    maker[static_cast<size_t>(index)] = std::this_thread::get_id();
  };
  DataLoader loader(source, {.batch_size = 1, .num_workers = 3, .persistent_workers = true});
  one_epoch(loader, 0);
  const std::vector<std::thread::id> first(maker);
  CHECK(std::set(first.begin(), first.end()).size() == 3);
  for (size_t b = 3; b < 60; ++b) CHECK(first[b] == first[b - 3]);
  for (const int64_t begin : {1, 2, 5}) {
    one_epoch(loader, 1, begin);
    CHECK(maker == first);
  }
}

TEST_CASE("The last batch is short, or dropped; without batch size samples come one by one",
          "[loader][row24]") {
  const NumberedSource source(10);
  for (const int workers : {0, 2}) {
    DataLoader shorter(source, {.batch_size = 4, .num_workers = workers});
    CHECK(shorter.batches_per_epoch() == 3);
    CHECK(one_epoch(shorter, 0).back() == std::vector<int64_t>{8, 9});
    DataLoader dropping(source, {.batch_size = 4, .num_workers = workers, .drop_last = true});
    CHECK(dropping.batches_per_epoch() == 2);
    CHECK(one_epoch(dropping, 0) == Batches{{0, 1, 2, 3}, {4, 5, 6, 7}});
    DataLoader larger(source, {.batch_size = 1000000, .num_workers = workers});
    CHECK(one_epoch(larger, 0) == Batches{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}});
    DataLoader single(source, {.num_workers = workers});
    CHECK(single.batches_per_epoch() == 10);
    CHECK(one_epoch(single, 0)[7] == std::vector<int64_t>{7});
  }
}

TEST_CASE("An epoch of 0 batches is refused", "[loader][row10]") {
  const NumberedSource none(0), few(3);
  const auto refusal = [](const ImageSource& source, bool drop_last) {
    return message_of<BadInput>(
        [&] { DataLoader(source, {.batch_size = 4, .drop_last = drop_last}); });
  };
  CHECK_THAT(refusal(none, false), ContainsSubstring("0 batches: 0 samples"));
  CHECK_THAT(refusal(few, true), ContainsSubstring("0 batches: 3 samples make no batch of 4"));
}

TEST_CASE("Bad loader arguments are refused with their value", "[loader][row25]") {
  const NumberedSource source(10);
  const auto refusal = [&](const DataLoaderOptions& options) {
    return message_of<BadInput>([&] { DataLoader(source, options); });
  };
  CHECK_THAT(refusal({.batch_size = 0}), ContainsSubstring("batch_size is 0"));
  CHECK_THAT(refusal({.batch_size = -4}), ContainsSubstring("batch_size is -4"));
  CHECK_THAT(refusal({.num_workers = -1}), ContainsSubstring("num_workers is -1"));
  CHECK_THAT(refusal({.num_workers = 1, .timeout_seconds = -0.5}),
             ContainsSubstring("timeout is -0.5 s"));
  CHECK_THAT(refusal({.prefetch_factor = 3}),
             ContainsSubstring("prefetch_factor 3 with num_workers 0"));
  CHECK_THAT(refusal({.persistent_workers = true}),
             ContainsSubstring("persistent_workers is true with num_workers 0"));
  CHECK_THAT(refusal({.shuffle = true, .sampler = make_order(OrderKind::file, 10, 0)}),
             ContainsSubstring("shuffle is true and a sampler is given"));
  // Beyond PyTorch's six.
  CHECK_THAT(refusal({.timeout_seconds = 5}),
             ContainsSubstring("timeout of 5 s with num_workers 0"));
  CHECK_THAT(refusal({.num_workers = 1, .prefetch_factor = 0}),
             ContainsSubstring("prefetch_factor is 0"));
  CHECK_THAT(refusal({.max_held = 0}), ContainsSubstring("max_held is 0"));
}

TEST_CASE("An order that does not fit the source is refused", "[loader]") {
  const NumberedSource source(10);
  DataLoader loader(source, {.sampler = make_order(OrderKind::file, 11, 0)});
  CHECK_THROWS_WITH(loader.begin_epoch(0), ContainsSubstring("sample 10, expected 0 to 9"));
  CHECK_THROWS_WITH(loader.next(), ContainsSubstring("call begin_epoch() first"));
}

TEST_CASE("What a source throws in a worker arrives with the worker's number, threads joined",
          "[loader][row26]") {
  NumberedSource source(40);
  source.before_read = [](int64_t index) {
    if (index == 7) fail<DeviceError>("disk 3: sector 7 is bad");
  };
  const int64_t threads_before = threads_of_this_process();
  for (const bool persistent : {false, true}) {
    DataLoader loader(source,
                      {.batch_size = 2, .num_workers = 3, .persistent_workers = persistent});
    loader.begin_epoch(0);
    for (int64_t batch = 0; batch < 3; ++batch) CHECK(loader.next()->index == batch);
    // Sample 7 is in batch 3, of worker 3 mod 3.
    CHECK(message_of<DeviceError>([&] { loader.next(); }) ==
          "loader worker 0: disk 3: sector 7 is bad");
    CHECK(only_threads_left(threads_before));
    CHECK_THROWS_WITH(loader.next(), ContainsSubstring("call begin_epoch() first"));

    // The loader itself is none the worse.
    loader.begin_epoch(0, 4);
    CHECK(collect(loader, 4).size() == 16);
  }
  CHECK(only_threads_left(threads_before));
}

TEST_CASE("Each kind of error keeps its kind; without workers it passes as it is",
          "[loader][row26]") {
  NumberedSource source(4);
  const auto next_of = [&](int workers) {
    return [&source, workers] {
      DataLoader loader(source, {.num_workers = workers});
      loader.begin_epoch(0);
      loader.next();
    };
  };
  source.before_read = [](int64_t) { fail<BadInput>("bad"); };
  CHECK(message_of<BadInput>(next_of(1)) == "loader worker 0: bad");
  CHECK(message_of<BadInput>(next_of(0)) == "bad");
  source.before_read = [](int64_t) { fail<EnvironmentError>("gone"); };
  CHECK(message_of<EnvironmentError>(next_of(1)) == "loader worker 0: gone");
  source.before_read = [](int64_t) { throw std::logic_error("logic"); };
  CHECK(message_of<Error>(next_of(1)) == "loader worker 0: logic");
  CHECK(message_of<std::logic_error>(next_of(0)) == "logic");
  source.before_read = [](int64_t) { throw 5; };
  CHECK_THAT(message_of<Error>(next_of(1)), ContainsSubstring("loader worker 0"));
}

TEST_CASE("However often a source fails, the loader loses none of its buffers", "[loader][row26]") {
  NumberedSource source(40);
  for (const int workers : {0, 2}) {
    CAPTURE(workers);
    source.before_read = [](int64_t index) {
      if (index == 5) fail<DeviceError>("disk 3: sector 7 is bad");
    };
    DataLoader loader(source, {.batch_size = 2, .num_workers = workers});
    for (int64_t failures = 0; failures <= 8; ++failures) {
      loader.begin_epoch(0);
      CHECK_THAT(message_of<DeviceError>([&] { collect(loader); }),
                 ContainsSubstring("disk 3: sector 7 is bad"));
    }
    source.before_read = nullptr;
    CHECK(one_epoch(loader, 1).size() == 20);
  }
}

TEST_CASE("A source that hangs ends in a timeout error, not in a hang", "[loader][row27]") {
  testing::Gate gate;
  NumberedSource source(20);
  source.before_read = [&](int64_t index) {
    if (index == 6) gate.pass();
  };
  DataLoader loader(source, {.batch_size = 2, .num_workers = 2, .timeout_seconds = 1});
  loader.begin_epoch(0);
  for (int64_t batch = 0; batch < 3; ++batch) CHECK(loader.next()->index == batch);
  const auto begin = Clock::now();
  CHECK_THAT(message_of<EnvironmentError>([&] { loader.next(); }),
             ContainsSubstring("batch 3 of epoch 0 did not come from worker 1 within 1 s"));
  CHECK(seconds_since(begin) >= 0.9);
  CHECK(seconds_since(begin) < 20);
  // Nothing was lost: once the source answers, the batch comes after all.
  gate.open();
  CHECK(number_in(loader.next()->images) == 6);
}

TEST_CASE("A consumer that stops in mid-epoch waits for no more than the reads under way",
          "[loader][row28]") {
  NumberedSource source(100000);
  std::atomic<int64_t> reads = 0;
  // A batch takes 2 s, one sample 1 ms.
  source.before_read = [&reads](int64_t) {
    ++reads;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  const int64_t threads_before = threads_of_this_process();
  for (const bool persistent : {false, true}) {
    auto loader = std::make_unique<DataLoader>(
        source,
        DataLoaderOptions{.batch_size = 2000, .num_workers = 4, .persistent_workers = persistent});
    loader->begin_epoch(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const int64_t reads_before = reads;
    loader.reset();
    // The rest of the batches under way would be nearly 8000. Told in reads, since a busy machine
    // stretches every time.
    CHECK(reads - reads_before < 1000);
    CHECK(only_threads_left(threads_before));
  }
  // Also right after construction, and with batches taken and workers asleep at their bound.
  source.before_read = nullptr;
  const auto begin = Clock::now();
  {  // begins no epoch
    DataLoader unused(source, {.num_workers = 8});
  }
  for (int round = 0; round < 20; ++round) {
    DataLoader loader(source, {.batch_size = 10, .num_workers = 2});
    loader.begin_epoch(0);
    for (int i = 0; i < round; ++i) loader.next();
  }
  CHECK(seconds_since(begin) < 20);  // a worker that is not woken sleeps for good
}

TEST_CASE("A batch outlives its loader", "[loader][row28]") {
  const NumberedSource source(20);
  std::optional<HostBatch> kept;
  {
    DataLoader loader(source, {.batch_size = 5, .num_workers = 2});
    loader.begin_epoch(0);
    loader.next();
    kept = loader.next();
  }
  CHECK(number_in(kept->images) == 5);
  CHECK(kept->labels[4] == 9);
  HostBatch moved = std::move(*kept);
  kept.reset();
  CHECK(number_in(moved.images + 16) == 9);
}

TEST_CASE("Never more than prefetch_factor * num_workers batches are under way",
          "[loader][row29]") {
  std::atomic<int64_t> reads = 0;
  NumberedSource source(400);
  source.before_read = [&](int64_t) { ++reads; };
  for (const auto& [workers, factor] : {std::pair{1, 1}, {1, 3}, {2, 2}, {4, 3}}) {
    CAPTURE(workers, factor);
    const int64_t bound = int64_t{workers} * factor;
    DataLoader loader(source, {.batch_size = 4, .num_workers = workers, .prefetch_factor = factor});
    reads = 0;
    loader.begin_epoch(0);
    // A consumer that does nothing: the workers fill the window, then sleep.
    const auto begin = Clock::now();
    while (reads < bound * 4 && seconds_since(begin) < 20) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(reads == bound * 4);
    CHECK(loader.most_in_flight() == bound);
    // One batch taken: one more is made.
    loader.next();
    while (reads < (bound + 1) * 4 && seconds_since(begin) < 20) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(reads == (bound + 1) * 4);
    while (loader.next()) {
    }
    CHECK(loader.most_in_flight() == bound);
  }
}

TEST_CASE("Buffers are allocated once, from the given allocator, and reused", "[loader][row29]") {
  const Dataset source = make_synthetic(SyntheticPart::train, 100);
  int64_t allocations = 0;
  DataLoaderOptions options{.batch_size = 8, .shuffle = true, .num_workers = 2, .max_held = 3};
  options.allocator = [&](size_t bytes) {
    ++allocations;
    CHECK(bytes >= 8 * (784 + sizeof(int32_t)));
    return allocate_host(bytes);
  };
  DataLoader loader(source, options);
  CHECK(allocations == 2 * 2 + 3);
  std::set<const void*> seen;
  for (const int64_t epoch : {0, 1, 2}) {
    loader.begin_epoch(epoch);
    while (const auto batch = loader.next()) {
      seen.insert(batch->images);
      CHECK(reinterpret_cast<uintptr_t>(batch->images) % 64 == 0);
      CHECK(reinterpret_cast<uintptr_t>(batch->labels) % 64 == 0);
    }
  }
  CHECK(allocations == 7);
  CHECK(seen.size() <= 7);
}

TEST_CASE("A held batch is not written over, however far the loader goes on", "[loader][row29]") {
  const NumberedSource source(1000);
  for (const int workers : {0, 2}) {
    DataLoader loader(source, {.batch_size = 4, .num_workers = workers, .max_held = 3});
    loader.begin_epoch(0);
    const auto first = loader.next();
    const auto second = loader.next();
    int64_t batches = 2;
    while (loader.next()) ++batches;
    CHECK(batches == 250);
    CHECK(number_in(first->images) == 0);
    CHECK(number_in(second->images) == 4);
  }
}

TEST_CASE("next() waits for a batch that another thread still holds", "[loader][row29]") {
  const NumberedSource source(1000);
  DataLoader loader(source,
                    {.batch_size = 4, .num_workers = 1, .timeout_seconds = 20, .max_held = 1});
  loader.begin_epoch(0);
  auto held = loader.next();
  std::atomic<bool> given_back = false;
  std::thread copy([held = std::move(*held), &given_back]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    given_back = true;
    const HostBatch dropped = std::move(held);
  });
  const auto batch = loader.next();
  const bool waited = given_back;  // not a time: the other thread may run long before this one
  copy.join();
  CHECK(number_in(batch->images) == 4);
  CHECK(waited);
}

TEST_CASE("A consumer that waits for its own batches gets an error, not a hang", "[loader]") {
  const NumberedSource source(1000);
  DataLoader loader(source,
                    {.batch_size = 4, .num_workers = 1, .timeout_seconds = 0.2, .max_held = 2});
  loader.begin_epoch(0);
  auto first = loader.next();
  const auto second = loader.next();
  CHECK_THAT(message_of<EnvironmentError>([&] { loader.next(); }),
             ContainsSubstring("holds 2 batches") && ContainsSubstring("max_held (2)"));
  first.reset();
  CHECK(number_in(loader.next()->images) == 8);
}

}  // namespace
}  // namespace lockstep
