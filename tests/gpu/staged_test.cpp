// Collectives of GPUs in different processes, through page-locked memory and Gloo. Two ranks share
// cuda:0, each in a process of its own, which is this executable again: in one process the hosts'
// parts would wait for each other on the one thread that CUDA has for them.

#include <signal.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <thread>

#include "05-syncbn-checkpoint/sync_batchnorm.h"
#include "common/core/stream_backend.h"
#include "common/nn/init.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/local_store.h"
#include "tests/support/stage.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using testing::Clock;
using testing::is_model;
using testing::kGpu;
using testing::kLong;
using testing::kSoon;
using testing::message_of;
using testing::numbered;
using testing::occupy;
using testing::ProcessResult;
using testing::random_values;
using testing::Ranks;
using testing::read_text;
using testing::relative_l2;
using testing::ScopedEnvironment;
using testing::seconds_since;
using testing::Words;
using Floats = BasicTensor<float>;

// --- The ranks' processes ------------------------------------------------------------------------

/// A rendezvous in a folder: a key is a file.
class Folder {
 public:
  explicit Folder(std::filesystem::path path) : path_(std::move(path)) {}

  void set(const std::string& key, const std::string& value) const {
    const std::filesystem::path whole = file(key), part = whole.string() + ".part";
    testing::write_file(part, value);
    std::filesystem::rename(part, whole);
  }
  std::string get(const std::string& key) const {
    const auto begin = Clock::now();
    while (!std::filesystem::exists(file(key))) {
      if (seconds_since(begin) > 20) fail<PeerLost>("nobody set {}", key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return read_text(file(key));
  }

 private:
  std::filesystem::path file(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return path_ / key;
  }
  std::filesystem::path path_;
};

/// Runs the hidden case `tag` in two processes, ranks 0 and 1 of a group.
std::vector<ProcessResult> run_two_ranks(const std::string& tag) {
  const testing::TempDir folder;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<std::future<ProcessResult>> running;
  for (const std::string rank : {"0", "1"}) {
    running.push_back(std::async(std::launch::async, [&, rank] {
      return testing::run_process({self, tag}, kLong,
                                  {{"LOCKSTEP_TEST_LOG", "/dev/null"},
                                   {"RANK", rank},
                                   {"LOCKSTEP_TEST_RENDEZVOUS", folder.path().string()}});
    }));
  }
  std::vector<ProcessResult> results;
  for (auto& process : running) results.push_back(process.get());
  return results;
}

/// The output of the process that started this one.
std::string told(const char* variable) {
  const char* value = std::getenv(variable);
  require(value != nullptr, "{} is not set: run the case that starts this one", variable);
  return value;
}

/// This process's rank of two.
struct StagedRank {
  explicit StagedRank(double timeout_seconds = kLong, const DeviceOptions& options = {})
      : ranks(kGpu, rank, 2, options, [&](Device&) {
          const RendezvousStore store{
              [&](const std::string& key, const std::string& value) { folder.set(key, value); },
              [&](const std::string& key) { return folder.get(key); }};
          return std::make_unique<HostCommunicator>(
              rank, 2, connect_gloo(rank, 2, store, "127.0.0.1", timeout_seconds));
        }) {}

  Communicator& communicator() const { return *ranks.comms[rank]; }
  /// The other rank may be reading what this one sent last.
  void leave() const {
    folder.set(fmt::format("through {}", rank), "");
    folder.get(fmt::format("through {}", 1 - rank));
  }

  const int rank = std::stoi(told("RANK"));
  const Folder folder{told("LOCKSTEP_TEST_RENDEZVOUS")};
  Ranks ranks;
  Stream stream = ranks.streams[rank];
};

void check_two_ranks(const std::string& tag) {
  for (const ProcessResult& rank : run_two_ranks(tag)) {
    INFO(testing::story(rank));
    CHECK_FALSE(rank.timed_out);
    CHECK(rank.status == 0);
  }
}

// --- Results -------------------------------------------------------------------------------------

TEST_CASE("A rank of the next case: everything that ranks can do", "[.staged-collectives]") {
  StagedRank here;
  CHECK(testing::first_fault_of_all(here.ranks, {0, 1, 2, 3, 1000}) == "");
  here.leave();
}

TEST_CASE("Two processes on one GPU: every collective is what a serial program computes",
          "[cuda][comm][staged][row70]") {
  LOCKSTEP_NEEDS_GPU();
  check_two_ranks("[.staged-collectives]");
}

TEST_CASE("A rank of the next case: traced calls", "[.staged-trace]") {
  const StagedRank here(kLong, {.trace = true});
  const bool root = here.rank == 0;
  const auto memory = numbered<float>(here.ranks, 20, 1);
  const Elements all = Elements(memory[0]).part(0, 10), mine = Elements(memory[0]).part(10, 5);
  here.stream.synchronize();
  const size_t before = here.stream.backend().timeline().size();
  here.ranks.together([&](Communicator& comm, Stream stream) {
    comm.broadcast(stream, mine, 0);
    comm.all_gather(stream, mine, all);
    comm.reduce_scatter(stream, all, mine);
    comm.all_reduce(stream, mine);
    comm.barrier(stream);
    root ? comm.send(stream, mine, 1) : comm.receive(stream, mine, 0);
    root ? comm.receive(stream, mine, 1) : comm.send(stream, mine, 0);
  });
  here.stream.synchronize();
  const std::vector<Span> spans = here.stream.backend().timeline();
  Words names;
  for (size_t i = before; i < spans.size(); ++i) names.push_back(spans[i].op);
  Words expected = root ? Words{"copy", "broadcast"} : Words{"broadcast", "copy"};
  for (const char* op : {"copy", "all_gather", "copy", "copy", "reduce_scatter", "copy", "copy",
                         "all_reduce", "copy", "barrier", "copy", "transfers", "copy"}) {
    expected.push_back(op);
  }
  CHECK(names == expected);
  here.leave();
}

TEST_CASE("Two processes on one GPU: only what moves is copied, and the trace names what runs",
          "[cuda][comm][staged]") {
  LOCKSTEP_NEEDS_GPU();
  check_two_ranks("[.staged-trace]");
}

// --- SyncBatchNorm -------------------------------------------------------------------------------

/// y, dx, gradients and running statistics of a training pass of a layer over rows of 33 channels.
std::vector<std::vector<double>> norm_pass(Stream stream, int64_t first, int64_t rows,
                                           const std::function<void(BatchNorm2d&)>& convert) {
  BatchNorm2d layer(33, Activation::relu);
  layer.set_name("bn1");
  const FlatParameters parameters(layer, stream);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  convert(layer);
  Context context(stream);
  const Shape whole{700, 1, 1, 33};
  const Tensor x = Tensor::from_host(stream, whole, random_values(whole, 1));
  const Tensor dy = Tensor::from_host(stream, whole, random_values(whole, 2));
  const Tensor y = layer.forward(x.rows(first, rows), context);
  const Tensor dx = layer.backward(dy.rows(first, rows), context);
  std::vector<std::vector<double>> found;
  for (const Tensor& tensor : {y, dx, parameters.gradients(), parameters.buffer_values()}) {
    const std::vector<Real> values = tensor.to_host();
    found.emplace_back(values.begin(), values.end());
  }
  return found;
}

TEST_CASE("A rank of the next case: a synchronised layer", "[.staged-syncbn]") {
  StagedRank here;
  const Stream communication = here.ranks.devices[0]->create_stream("communication");
  const auto convert = [&](BatchNorm2d& layer) {
    convert_sync_batchnorm(layer, here.communicator(), communication);
  };
  const auto cpu_device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Stream cpu = cpu_device->create_stream("whole");
  for (const int64_t of_rank_0 : {233, 700, 699}) {  // 700: none for rank 1
    INFO("rank 0 has " << of_rank_0 << " rows");
    const int64_t first = here.rank == 0 ? 0 : of_rank_0;
    const int64_t rows = here.rank == 0 ? of_rank_0 : 700 - of_rank_0;
    auto found = norm_pass(here.stream, first, rows, convert);
    const auto expected = norm_pass(cpu, 0, 700, [](BatchNorm2d&) {});
    const auto close = [&](size_t i) {
      const auto begin = expected[i].begin() + (i < 2 ? first * 33 : 0);
      return relative_l2(found[i], {begin, begin + std::ssize(found[i])}) <= 1e-5;
    };
    CHECK((close(0) && close(1) && close(3)));
    // Gradients of weight and bias are the rank's own: their sum is that of the whole.
    const auto sums =
        Tensor::from_host(here.stream, {std::ssize(found[2])}, {found[2].begin(), found[2].end()});
    here.communicator().all_reduce(here.stream, sums);
    const std::vector<Real> values = sums.to_host();
    found[2].assign(values.begin(), values.end());
    CHECK(close(2));
  }
  here.leave();
}

TEST_CASE("Two processes on one GPU: a synchronised layer is that of the CPU over the whole batch",
          "[cuda][syncbn][staged][row98]") {
  LOCKSTEP_NEEDS_GPU();
  check_two_ranks("[.staged-syncbn]");
}

// --- Order ---------------------------------------------------------------------------------------

/// The sum of both ranks' x when a slow kernel, which makes x, comes before it on another stream,
/// and the sum waits for that or not.
std::vector<float> sum_behind_slow_kernel(const StagedRank& here, bool wait) {
  const Stream compute = here.stream, comm = here.ranks.devices[0]->create_stream("comm");
  const Floats x = numbered<float>(here.ranks, 100, -100)[here.rank];
  const Floats sum = numbered<float>(here.ranks, 100, 0)[here.rank];
  compute.synchronize();
  occupy(compute, 0.3);
  compute.kernels().fill(compute, Real(here.rank + 1), x);
  const Event made = compute.record();
  if (wait) comm.wait(made);
  here.communicator().all_reduce(comm, x);
  comm.copy(sum.data(), x.data(), x.bytes());
  compute.wait(comm.record());
  CHECK_FALSE(made.done());
  return sum.to_host();
}

TEST_CASE("A rank of the next case: sums after a slow kernel", "[.staged-order]") {
  const StagedRank here;
  CHECK(sum_behind_slow_kernel(here, true) == std::vector<float>(100, 3));
  CHECK(sum_behind_slow_kernel(here, false) == std::vector<float>(100, -199));
  here.leave();
}

TEST_CASE("Two processes on one GPU: without its wait a collective sums what is not there yet",
          "[cuda][comm][staged][row127]") {
  LOCKSTEP_NEEDS_GPU();
  check_two_ranks("[.staged-order]");
}

/// A group of one rank, which needs no other process.
Ranks lone_rank() {
  testing::LocalStore store;
  return Ranks(kGpu, 0, 1, {}, [&](Device&) {
    return std::make_unique<HostCommunicator>(0, 1,
                                              connect_gloo(0, 1, store.view(), "127.0.0.1", kLong));
  });
}

TEST_CASE("Staged calls on two streams of a GPU run one after another", "[cuda][comm][staged]") {
  LOCKSTEP_NEEDS_GPU();
  const Ranks ranks = lone_rank();
  const auto x = numbered<float>(ranks, 10, 1), y = numbered<float>(ranks, 10, 2);
  const Stream first = ranks.streams[0], second = ranks.devices[0]->create_stream("second");
  first.synchronize();
  occupy(first, 0.1);
  const Event made = first.record();
  ranks.comms[0]->all_reduce(first, x[0]);
  ranks.comms[0]->all_reduce(second, y[0]);
  CHECK_FALSE(made.done());
  second.synchronize();  // that is, after the sum of x
  CHECK(made.done());
}

TEST_CASE("Staged calls take turns in memory that is allocated once", "[cuda][comm][staged]") {
  LOCKSTEP_NEEDS_GPU();
  const Ranks ranks = lone_rank();
  if (!is_model(*ranks.devices[0])) LOCKSTEP_SKIP("no GPU that fails when it is told to");
  const auto x = numbered<float>(ranks, 100000, 1), all = numbered<float>(ranks, 100000, 2);
  const auto gather = [&](int64_t n) {
    ranks.comms[0]->all_gather(ranks.streams[0], Elements(x[0]).part(0, n),
                               Elements(all[0]).part(0, n));
  };
  gather(100000);
  const ScopedEnvironment fault("CUDA_MODEL_FAULT", "cudaHostAlloc:2");  // the next one fails
  for (int64_t n = 100000; n > 0; n /= 2) gather(n);
  CHECK(all[0].to_host() == std::vector<float>(100000, 1));
}

// --- Ranks that go -------------------------------------------------------------------------------

/// Sums that take a second, all enqueued, and a stream that waits for them.
Stream enqueue_many_sums(const StagedRank& here, const Floats& x) {
  for (int i = 0; i < 300; ++i) here.communicator().all_reduce(here.stream, x);
  const Stream behind = here.ranks.devices[0]->create_stream("behind");
  behind.wait(here.stream.record());
  return behind;
}

TEST_CASE("A rank of the next case: rank 1 is killed in the middle", "[.staged-killed]") {
  const StagedRank here;
  const Floats x = numbered<float>(here.ranks, 1000000, 1)[here.rank];
  here.communicator().all_reduce(here.stream, x);
  here.stream.synchronize();
  const Stream behind = enqueue_many_sums(here, x);
  if (here.rank == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::raise(SIGKILL);
  }
  const auto begin = Clock::now();
  const std::string text = message_of<PeerLost>([&] { behind.synchronize(); });
  INFO(text);
  CHECK(seconds_since(begin) < 3 * kSoon);  // the sums before it take their time
  CHECK_THAT(text, StartsWith("rank 0: collective ") &&
                       ContainsSubstring(" (all_reduce of 1000000 f32, sum): Gloo: "));
  CHECK(message_of<PeerLost>([&] { here.stream.synchronize(); }) == text);
  CHECK(message_of<PeerLost>([&] { x.to_host(); }) == text);
}

TEST_CASE("A GPU's rank whose peer is killed during an all-reduce says so at once, and ends",
          "[cuda][comm][staged][row125]") {
  LOCKSTEP_NEEDS_GPU();
  const std::vector<ProcessResult> ranks = run_two_ranks("[.staged-killed]");
  INFO(testing::story(ranks[0]));
  CHECK(ranks[0].status == 0);
  CHECK(ranks[1].status == -SIGKILL);
}

TEST_CASE("A rank of the next case: rank 1 does not come", "[.staged-silent]") {
  const StagedRank here(0.5);
  const Floats x = numbered<float>(here.ranks, 10, 1)[here.rank];
  if (here.rank == 0) {
    const auto begin = Clock::now();
    const Stream behind = enqueue_many_sums(here, x);
    const std::string text = message_of<PeerLost>([&] { behind.synchronize(); });
    CHECK_THAT(text, StartsWith("rank 0: collective 1 (all_reduce of 10 f32, sum): Gloo: Timed"));
    CHECK(seconds_since(begin) >= 0.4);
    CHECK(seconds_since(begin) < kSoon);  // and not 300 times the deadline
  }
  here.leave();
}

TEST_CASE("A GPU's rank whose peer does not come ends at the deadline",
          "[cuda][comm][staged][row72][row125]") {
  LOCKSTEP_NEEDS_GPU();
  check_two_ranks("[.staged-silent]");
}

}  // namespace
}  // namespace lockstep
