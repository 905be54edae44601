// Grades stage 05.

#include <cmath>

#include "05-syncbn-checkpoint/sync_batchnorm.h"
#include "05-syncbn-checkpoint/training_state.h"
#include "common/core/stream_backend.h"
#include "common/io/file.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/other_rank.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/support/replaced_system_calls.h"
#include "tests/support/safetensors_support.h"

namespace lockstep {
namespace {

/// Statistics of one channel: of a part, or of the whole batch.
struct Statistics {
  double mean, m2, rows;
};

/// The merge of parts, by the kernel.
Statistics merged(const std::vector<Statistics>& parts) {
  const testing::TestDevice device;
  std::vector<Real> gathered;
  for (const Statistics& part : parts) {
    for (const double value : {part.mean, part.m2, part.rows}) gathered.push_back(Real(value));
  }
  HINT(
      "one channel: where do its mean, its M2 and the rows stand, in the parts and in the result?");
  const Tensor whole = device.filled({3}, -1);
  device.kernels().batch_norm_merge(
      device.stream, device.put({static_cast<int64_t>(parts.size()), 3}, gathered), whole);
  const std::vector<Real> found = whole.to_host();
  return {double(found[0]), double(found[1]), double(found[2])};
}

TEST_CASE("A part alone is the whole", "[task05.1]") {
  const Statistics whole = merged({{1, 2, 2}});
  {
    HINT("-1 stood there before the call: are all 2 C + 1 numbers written?");
    CHECK(whole.mean != -1);
    CHECK(whole.m2 != -1);
    CHECK(whole.rows != -1);
  }
  {
    HINT(
        "is anything there before the first part (memory is not 0 by itself), and does the mean "
        "move towards the part?");
    CHECK(whole.mean == 1);
    CHECK(whole.rows == 2);
  }
  HINT(
      "a part alone keeps its M2, a sum and no mean: no rows came before it, so that its distance "
      "to "
      "them counts nothing");
  CHECK(whole.m2 == 2);
}

TEST_CASE("Two parts of the same size", "[task05.1]") {
  // 0 2 | 4 6
  const Statistics whole = merged({{1, 2, 2}, {5, 2, 2}});
  {
    HINT(
        "the mean of 0, 2, 4 and 6: where does the second part begin, and how far does it move "
        "it?");
    CHECK(whole.mean == Approx(3));
  }
  {
    HINT("how many rows have both parts together?");
    CHECK(whole.rows == 4);
  }
  {
    HINT("the parts' means are 4 apart: is that squared, and taken before the mean has moved?");
    CHECK(whole.m2 != Approx(8));
  }
  HINT(
      "M2 is the sum of squared distances to the mean of all: the distance between the parts' "
      "means is in it, too");
  CHECK(whole.m2 == Approx(20));
}

TEST_CASE("Parts of different sizes", "[task05.1]") {
  // 10 | 1 2 3
  const Statistics whole = merged({{10, 0, 1}, {2, 2, 3}});
  {
    HINT("a part of one row has an M2 of 0, but its row and its mean count");
    CHECK(whole.rows == 4);
  }
  {
    HINT("a part counts by its rows: the average of averages is another number");
    CHECK(whole.mean == Approx(4));
  }
  HINT("by how much does the distance of the means count, if one part has more rows?");
  CHECK(whole.m2 == Approx(50));
}

TEST_CASE("Every channel has its own mean and M2", "[task05.1]") {
  // Channel 0 as in the case before, channel 1 ten times that. Means, M2s, rows.
  const testing::TestDevice device;
  const Tensor parts = device.put({2, 5}, {10, 100, 0, 0, 1,  //
                                           2, 20, 2, 200, 3}),
               whole = device.filled({5}, -1);
  HINT("means of all channels, then M2s of all channels, then the rows, which all channels share");
  device.kernels().batch_norm_merge(device.stream, parts, whole);
  std::vector<long> rounded;
  for (const Real value : whole.to_host()) rounded.push_back(std::lround(value));
  CHECK(rounded == std::vector<long>{4, 40, 50, 5000, 4});
}

TEST_CASE("Three parts, one of them a rank without samples", "[task05.1]") {
  // nothing | 1 3 | 5
  const Statistics whole = merged({{0, 0, 0}, {2, 2, 2}, {5, 0, 1}});
  HINT(
      "a rank may have no rows: does anything divide by them, does its mean of 0 count, and do the "
      "parts behind it?");
  CHECK(whole.mean == Approx(3));
  CHECK(whole.m2 == Approx(8));
  CHECK(whole.rows == 3);
  HINT("no rows at all are no reason for NaN");
  CHECK(merged({{0, 0, 0}, {0, 0, 0}}).mean == 0);
}

TEST_CASE("A large mean keeps the digits of a small spread", "[task05.1]") {
  // 99999 100001 | 100001 100003
  const Statistics whole = merged({{100000, 2, 2}, {100002, 2, 2}});
  HINT("a square of a mean is a large number: what is left after subtracting another?");
  CHECK(whole.m2 == Approx(8).epsilon(1e-5));
  CHECK(whole.mean == Approx(100001));
  const double large = std::ldexp(1, 40);  // not even long double keeps 8 beside its square
  CHECK(merged({{large, 4, 2}, {large, 4, 2}}).m2 == 8);
}

// --- Backward's sums -----------------------------------------------------------------------------

/// A layer's two sums on rank 0; the other rank's are 10 each.
struct LayerSums {
  explicit LayerSums(int world_size = 2, Real its_share = 10) : other(its_share, world_size) {
    device.stream.synchronize();
  }
  ~LayerSums() {
    gate.open();
    for (const Stream& stream : {device.stream, communication}) {
      try {
        stream.synchronize();
      } catch (const Error&) {  // the test reports it
      }
    }
  }
  void merge() { synchronised.merge_sums(sums, layer, context); }

  testing::Gate gate{2};
  testing::OtherRank other;
  testing::TestDevice device;
  Stream communication = device.device->create_stream("communication");
  SyncBatchNorm synchronised{other, communication};
  BatchNorm2d layer{1};
  Context context{device.stream};
  Tensor sums = device.put({2, 1}, {1, 2});  // sum(dy), sum(dy (x - mean))
};

TEST_CASE("Backward's sums are over the rows of all ranks", "[task05.2]") {
  LayerSums rank;
  HINT("every rank needs the sums, so which collective is it? And the host only enqueues it");
  rank.merge();
  rank.communication.synchronize();
  const std::vector<Real> found = rank.sums.to_host();
  {
    HINT(
        "these are the sums over this rank's rows: a sample moves the mean and the variance that "
        "the samples of all ranks are normalised with");
    CHECK(found != std::vector<Real>{1, 2});
  }
  {
    HINT("there are two sums in this tensor, and only one of them was added up");
    CHECK(found[0] != 1);
    CHECK(found[1] != 2);
  }
  HINT("sums, not means: the kernel that takes them divides by the rows of all ranks itself");
  CHECK(found == std::vector<Real>{11, 12});
}

TEST_CASE("Both sums travel in one call, in the order of all calls", "[task05.2]") {
  LayerSums rank;
  rank.merge();
  {
    HINT("every call costs a latency: one is enough for both sums");
    REQUIRE(rank.other.sums.size() == 1);
    CHECK(rank.other.sums[0].x.count == 2);
  }
  HINT(
      "calls on two streams race for the communicator, and ranks can come to wait for each other "
      "crosswise: on which stream do the others go?");
  CHECK(rank.other.sums[0].stream.backend().name() == "communication");
}

TEST_CASE("The call waits for the sums, and the pass for the call", "[task05.2]") {
  SECTION("a slow kernel makes the sums") {
    LayerSums rank;
    testing::enqueue(rank.device.stream, [&] { rank.gate.pass(); });
    rank.device.kernels().fill(rank.device.stream, 5, rank.sums);
    {
      HINT("does the host wait for the device? It has to go on and enqueue");
      rank.merge();
    }
    HINT(
        "the sums were sent before the device had made them: what does the communication stream "
        "wait for?");
    CHECK(rank.other.done_after_a_while(0) == 0);
    rank.gate.open();
    rank.communication.synchronize();  // does the pass wait, too? see below
    CHECK(rank.sums.to_host() == std::vector<Real>{15, 15});
  }
  SECTION("the other rank is slow") {
    std::atomic<int> calls_done = -1;  // when the pass continues
    LayerSums rank;
    rank.other.before_sum = [&] { rank.gate.pass(); };
    rank.merge();
    testing::enqueue(rank.device.stream, [&] { calls_done = rank.other.done.load(); });
    rank.other.done_after_a_while(0);
    rank.gate.open();
    rank.device.stream.synchronize();
    HINT(
        "backward went on before the other rank's sums were there: what does its stream wait for?");
    CHECK(calls_done == 1);
  }
}

TEST_CASE("A rank alone has the sums already", "[task05.2]") {
  LayerSums rank(1);
  rank.merge();
  HINT("with one rank there is nobody to call");
  CHECK(rank.other.sums.empty());
}

// --- Saving --------------------------------------------------------------------------------------

using testing::SystemCalls;
using testing::TempDir;
using Names = std::vector<std::string>;

/// A file's bytes; "" where there is none.
std::string text_of(const std::filesystem::path& path) {
  return std::filesystem::exists(path) ? testing::read_text(path) : "";
}

/// Saves "01234" and "56789" as one file of 10 bytes.
void save_digits(const std::filesystem::path& path) {
  const std::vector<std::byte> first = testing::io::to_bytes("01234"),
                               second = testing::io::to_bytes("56789");
  const std::span<const std::byte> pieces[] = {first, second};
  write_file_atomically(path, pieces);
}

/// A save over a file "old": what was done to the disk, and the state at the rename.
struct WatchedSave {
  WatchedSave() {
    testing::write_file(path, "old");
    SystemCalls calls;
    calls.before_rename = [&](const char* from, const char*) {
      path_then = text_of(path);
      new_file_then = text_of(from);
      folder_then = std::filesystem::path(from).parent_path();
    };
    HINT("this save ought to come to its end: whose place is the temporary file to take?");
    save_digits(path);
    synchronised = calls.last_directory;
    std::string* part = &before_rename;
    for (const std::string& call : calls.log) {
      if (call == "rename") {
        part = &after_rename;
      } else {
        *part += call + "; ";
      }
    }
  }
  TempDir directory;
  const std::filesystem::path path = directory / "model";
  std::string path_then = "(nothing was renamed)", new_file_then, folder_then;
  std::string before_rename, after_rename;  // the other calls
  std::string synchronised;                 // the last directory
};

TEST_CASE("A path has the whole old file or the whole new one", "[task05.3]") {
  const WatchedSave save;
  {
    HINT("all pieces, one after the other");
    CHECK(text_of(save.path) == "0123456789");
  }
  {
    HINT(
        "whoever reads the path meanwhile, or after a crash, has to find the old file: is the new "
        "one written in its place?");
    CHECK(save.path_then == "old");
  }
  {
    HINT("from the rename on readers get the new file: is it whole by then?");
    CHECK(save.new_file_then == "0123456789");
  }
  HINT("a rename from one disk to another is no rename: where does the temporary file belong?");
  CHECK(save.folder_then == save.directory.path().string());
}

TEST_CASE("A power cut at any moment leaves one of the two files", "[task05.3]") {
  using Catch::Matchers::ContainsSubstring;
  const WatchedSave save;
  {
    HINT(
        "write() hands bytes to the system, not to the disk: the new name may get there before "
        "they do, and belongs to an empty file after a power cut");
    CHECK_THAT(save.before_rename, ContainsSubstring("fsync file of 10 bytes"));
  }
  {
    HINT("the rename itself has to reach the disk, too: names belong to the directory");
    CHECK_THAT(save.after_rename, ContainsSubstring("fsync directory"));
  }
  HINT("a directory was synchronised, but not the one with the new name: which one was it?");
  CHECK(save.synchronised == save.directory.path().string());
}

TEST_CASE("Two processes may save at the same time", "[task05.3]") {
  const TempDir directory;
  SystemCalls calls;
  bool first = true, other_failed = false;
  calls.before_rename = [&](const char*, const char*) {
    if (!std::exchange(first, false)) return;
    try {
      save_digits(directory / "model");
    } catch (const Error&) {
      other_failed = true;
    }
  };
  HINT("another process saves at that moment: has each a temporary file of its own, by its name?");
  CHECK_NOTHROW(save_digits(directory / "model"));
  CHECK_FALSE(other_failed);
}

/// Whether the save throws on a disk that is full after this many bytes. Nothing else may be
/// written meanwhile, not even by assertions.
bool notices_full_disk(const std::filesystem::path& path, rlim_t bytes) {
  const testing::FullDisk full(bytes);
  try {
    save_digits(path);
  } catch (const EnvironmentError&) {
    return true;
  }
  return false;
}

TEST_CASE("A save that fails leaves the old file, and nothing else", "[task05.3]") {
  const TempDir directory;
  const std::filesystem::path path = directory / "model";
  testing::write_file(path, "old");
  for (const rlim_t bytes : {4, 8}) {  // within the first piece, and within the second
    HINT("the disk is full, and the caller has to know");
    CHECK(notices_full_disk(path, bytes));
  }
  for (const char* step : {"fsync file of 10 bytes", "rename"}) {
    SystemCalls calls;
    calls.failing = step;
    HINT("fsync and rename can fail, and the caller has to know");
    CHECK_THROWS_AS(save_digits(path), EnvironmentError);
  }
  {
    HINT("the old file is all there is now: was it removed with the temporary one?");
    CHECK(std::filesystem::exists(path));
  }
  {
    HINT("nobody will ever look for what a failed save leaves behind");
    CHECK(directory.names() == Names{"model"});
  }
  {
    HINT("the old file is all there is now");
    CHECK(text_of(path) == "old");
  }
  SystemCalls calls;
  calls.failing = "fsync directory";
  {
    HINT("the new name may not have reached the disk: the caller has to know that, too");
    CHECK_THROWS_AS(save_digits(path), EnvironmentError);
  }
  HINT("the error does not say what went wrong: fail_save() is given errno");
  CHECK_THROWS_WITH(save_digits(path), Catch::Matchers::ContainsSubstring(errno_text(EIO)));
}

TEST_CASE("Who may read the old file may read the new one", "[task05.3]") {
  const TempDir directory;
  const std::filesystem::path path = directory / "model";
  testing::write_file(path, "old");
  std::filesystem::permissions(path, std::filesystem::perms(0640));
  save_digits(path);
  HINT("a file that is replaced keeps its permissions: who makes the temporary file?");
  CHECK(std::filesystem::status(path).permissions() == std::filesystem::perms(0640));
}

// --- Resuming ------------------------------------------------------------------------------------

TEST_CASE("An interrupted epoch goes on where it was", "[task05.4]") {
  const TrainingState state{.epoch = 1, .step_in_epoch = 2, .steps = 6};
  {
    HINT(
        "the epoch begins anew: its first batches would be trained on twice. Which epoch is it "
        "that "
        "goes on?");
    CHECK(state.first_batch(1) != 0);
  }
  HINT("this is not the batch after the last one done: from what do batches count?");
  CHECK(state.first_batch(1) == 2);
}

TEST_CASE("Later epochs begin at their beginning", "[task05.4]") {
  const TrainingState state{.epoch = 1, .step_in_epoch = 2, .steps = 6};
  HINT("batches are left out: of which epoch were some done?");
  CHECK(state.first_batch(2) == 0);
  HINT("a new run begins at the beginning");
  CHECK(TrainingState{}.first_batch(0) == 0);
}

/// A run of two epochs with three batches each resumes after this many steps: which batches it
/// trained on ("epoch.batch").
Names go_on(TrainingState& state, int steps) {
  Names batches;
  for (int64_t epoch = state.epoch; epoch < 2; ++epoch) {
    for (int64_t batch = state.first_batch(epoch); batch < 3; ++batch) {
      batches.push_back(fmt::format("{}.{}", epoch, batch));
      state.count_step(0);
      if (std::ssize(batches) == steps) return batches;
    }
    state.count_epoch(0);
  }
  return batches;
}

TEST_CASE("Stopped after any step, a run trains on every batch once", "[task05.4]") {
  for (int stop = 1; stop <= 6; ++stop) {
    TrainingState state;
    Names batches = go_on(state, stop);
    const Names rest = go_on(state, 7);
    batches.insert(batches.end(), rest.begin(), rest.end());
    HINT("some batch comes twice or never where a run was stopped: count on from the steps done");
    CHECK(batches == Names{"0.0", "0.1", "0.2", "1.0", "1.1", "1.2"});
  }
}

}  // namespace
}  // namespace lockstep
