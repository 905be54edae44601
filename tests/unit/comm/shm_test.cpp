// Shared memory between ranks: how they come to it, what they compute there, and how they end.

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <new>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "common/comm/host_transport.h"
#include "common/comm/shm_segment.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/wire.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_ranks.h"
#include "tests/support/system_calls.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::kLong;
using testing::kShort;
using testing::kSoon;
using testing::message_of;
using testing::Ranks;
using testing::seconds_since;
using Transports = std::vector<std::shared_ptr<HostTransport>>;

// --- Sums ----------------------------------------------------------------------------------------

Transports shm_transports(int world_size, double timeout_seconds = kLong) {
  Transports all;
  for (auto& peers : testing::shm_peers(world_size, timeout_seconds)) {
    all.push_back(make_shm_transport(std::move(peers)));
  }
  return all;
}

Transports tcp_transports(int world_size) {
  const testing::Stores stores(world_size);
  Transports all(static_cast<size_t>(world_size));
  testing::run_ranks(world_size, [&](int rank) { all[rank] = connect_tcp(stores[rank], kLong); });
  return all;
}

/// What each rank has in its memory [W n + n] after a call of this kind; numbers whose sum depends
/// on the order.
template <class T>
std::vector<std::vector<T>> results(const Transports& ranks, Call::Op op, int64_t n,
                                    Reduction reduction) {
  const auto world_size = static_cast<int>(ranks.size());
  std::vector<std::vector<T>> memory;
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<T>& x = memory.emplace_back(size_t((world_size + 1) * n));
    T* const numbers = x.data();  // a plain pointer: test code is not optimised
    for (size_t i = 0; i < x.size(); ++i) {
      numbers[i] = T(T(1) / T(1 + 7 * size_t(rank) + i % 1013));
    }
  }
  const std::vector<std::string> errors = testing::run_ranks(world_size, [&](int rank) {
    T* const all = memory[size_t(rank)].data();
    const ElementType type = std::is_same_v<T, float>    ? ElementType::f32
                             : std::is_same_v<T, double> ? ElementType::f64
                                                         : ElementType::bf16;
    ranks[size_t(rank)]->run({.op = op,
                              .mine = {all + world_size * n, n, type},
                              .all = {all, world_size * n, type},
                              .peer = world_size - 1,
                              .reduction = reduction},
                             1);
  });
  CHECK(errors == std::vector<std::string>(ranks.size()));
  return memory;
}

template <class T>
void check_same_bits(int world_size, const std::vector<int64_t>& counts) {
  const Transports shm = shm_transports(world_size), tcp = tcp_transports(world_size);
  for (const Call::Op op : {Call::Op::all_reduce, Call::Op::reduce_scatter}) {
    for (const Reduction reduction : {Reduction::sum, Reduction::average}) {
      for (const int64_t n : counts) {
        INFO(name_of(op) << " of " << n << " numbers of " << sizeof(T) << " bytes, " << world_size
                         << " ranks");
        CHECK(results<T>(shm, op, n, reduction) == results<T>(tcp, op, n, reduction));
      }
    }
  }
}

TEST_CASE("Sums in shared memory have the bits that they have over TCP", "[comm][shm][tcp]") {
  for (const int world_size : {1, 2, 3, 4, 5, 6, 7, 8}) {
    if (world_size > 3 && world_size < 8 && !testing::full_campaign()) continue;
    // At once, at the limit to that, in one piece for each rank, and in several.
    check_same_bits<float>(world_size, {1, 1001, 4096, 4097, 30001});
    check_same_bits<double>(world_size, {5, 2049});
    if (world_size != 3 && !testing::full_campaign()) continue;
    check_same_bits<float>(world_size, {150001});
    check_same_bits<double>(world_size, {70001});
  }
}

/// Part `p` of a sum of bf16, number i of it, as it is when rank p+1's number has gone round to
/// rank p: rounded by each rank on the way, or once.
Bf16 summed(const std::vector<std::vector<Bf16>>& before, int p, int64_t i, bool each_rounds,
            float factor) {
  const auto of = [&](int k) { return float(before[size_t(p + k) % before.size()][size_t(i)]); };
  const int world_size = int(before.size());
  float sum = of(1);
  for (int k = 2; k <= world_size; ++k) {
    sum += of(k);
    if (k == world_size) sum *= factor;
    if (each_rounds) sum = Bf16(sum);
  }
  return Bf16(sum);
}

TEST_CASE("A sum of 16 bits is rounded once in shared memory, and by each rank of a ring",
          "[comm][shm][tcp][sixteen]") {
  for (const int world_size : {1, 2, 3, 5}) {
    const Transports shm = shm_transports(world_size), tcp = tcp_transports(world_size);
    for (const auto& [n, reduction] : {std::pair{1001, Reduction::sum},
                                       {1001, Reduction::average},
                                       {30001, Reduction::average}}) {
      INFO(n << " numbers, " << world_size << " ranks");
      const auto before = results<Bf16>(shm, Call::Op::barrier, n, reduction);
      const auto once = results<Bf16>(shm, Call::Op::all_reduce, n, reduction);
      const auto often = results<Bf16>(tcp, Call::Op::all_reduce, n, reduction);
      const float factor = reduction == Reduction::sum ? 1 : 1 / float(world_size);
      int64_t wrong = 0, apart = 0;
      for (int p = 0; p < world_size; ++p) {
        const RingPart part = ring_part(n, p, world_size);
        for (int64_t i = part.first; i < part.first + part.count; ++i) {
          const int64_t at = world_size * n + i;  // see results()
          const Bf16 expected = summed(before, p, at, false, factor);
          const Bf16 by_ring = summed(before, p, at, true, factor);
          for (size_t rank = 0; rank < size_t(world_size); ++rank) {
            wrong += once[rank][size_t(at)].bits != expected.bits;
            wrong += often[rank][size_t(at)].bits != by_ring.bits;
          }
          apart += expected.bits != by_ring.bits;
        }
      }
      CHECK(wrong == 0);
      CHECK((apart > 0) == (world_size > 2));
    }
  }
}

/// Recorded with PyTorch 2.15 on a CPU. i = torch.arange(1001) + W * 1001,
/// k = (1 + 7 * r + i % 1013).bfloat16(), x = torch.stack([(1 / k.float()).bfloat16() for r in
/// range(W)]): bits of x.sum(0) and x.mean(0) at 0, 100, 500 and 1000, and the sum of all bits.
TEST_CASE("A sum of bf16 in shared memory has the bits of PyTorch's sum", "[comm][shm][sixteen]") {
  struct Recorded {
    int world_size;
    Reduction reduction;
    std::array<uint16_t, 4> some;
    int64_t all;
  };
  constexpr int64_t n = 1001;
  for (const Recorded& recorded :
       std::vector<Recorded>{{2, Reduction::sum, {0x3b04, 0x3ccc, 0x3b88, 0x3b06}, 15296607},
                             {2, Reduction::average, {0x3a84, 0x3c4c, 0x3b08, 0x3a86}, 15168479},
                             {3, Reduction::sum, {0x3b48, 0x3d2c, 0x3bd0, 0x3b4a}, 15368784},
                             {3, Reduction::average, {0x3a85, 0x3c65, 0x3b0b, 0x3a87}, 15165518},
                             {5, Reduction::sum, {0x3ba9, 0x3dc1, 0x3c34, 0x3bac}, 15457343},
                             {5, Reduction::average, {0x3a87, 0x3c9a, 0x3b10, 0x3a89}, 15160349}}) {
    INFO(recorded.world_size << " ranks");
    const Transports ranks = shm_transports(recorded.world_size);
    const auto memory = results<Bf16>(ranks, Call::Op::all_reduce, n, recorded.reduction);
    const Bf16* const sums = memory.back().data() + recorded.world_size * n;  // see results()
    const std::array<uint16_t, 4> some{sums[0].bits, sums[100].bits, sums[500].bits,
                                       sums[1000].bits};
    CHECK(some == recorded.some);
    int64_t all = 0;
    for (int64_t i = 0; i < n; ++i) all += sums[i].bits;
    CHECK(all == recorded.all);
  }
}

/// A checkpoint may read a rank's shard while the others' come in beside it.
TEST_CASE("An all-gather in place leaves a rank's own part alone", "[comm][shm]") {
  const size_t page = size_t(::sysconf(_SC_PAGESIZE));
  const auto n = int64_t(page / sizeof(float));
  const Transports ranks = shm_transports(2);
  const std::vector<std::string> errors = testing::run_ranks(2, [&](int rank) {
    void* const memory =
        ::mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    float* const all = static_cast<float*>(memory);
    std::fill_n(all + rank * n, n, float(1 + rank));
    ::mprotect(all + rank * n, page, PROT_READ);  // to write there is a SIGSEGV
    ranks[size_t(rank)]->run({.op = Call::Op::all_gather,
                              .mine = {all + rank * n, n, ElementType::f32},
                              .all = {all, 2 * n, ElementType::f32}},
                             1);
    for (int64_t i = 0; i < 2 * n; ++i) {
      if (all[i] != float(1 + i / n)) throw std::runtime_error("not gathered");
    }
    ::munmap(memory, 2 * page);
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("In shared memory every collective of a large message takes as many rounds as it needs",
          "[comm][shm]") {
  for (const int world_size : {1, 2, 3, 8}) {
    Ranks ranks = testing::shm_ranks(world_size);
    testing::Trial<float> trial(ranks, 200003);
    trial.enqueue_all(/*every_root=*/false);
    CHECK(trial.first_fault(1e-5) == "");
  }
}

TEST_CASE("Ranks in shared memory that sleep are woken by every round", "[comm][shm][tsan]") {
  const Transports ranks = shm_transports(3);
  const std::vector<std::string> errors = testing::run_ranks(3, [&](int rank) {
    for (int64_t round = 1; round <= 60; ++round) {
      if (round % 3 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      int64_t x = rank + round;
      ranks[size_t(rank)]->run(
          {.op = Call::Op::all_reduce, .mine = {&x, 1, ElementType::i64}, .all = {}}, 1);
      require_equal(x, 3 + 3 * round, "sum");
    }
  });
  CHECK(errors == std::vector<std::string>(3));
}

// --- Memory --------------------------------------------------------------------------------------

/// Bytes that the memory of these ranks takes, and that it would if all lanes were used.
std::pair<int64_t, int64_t> taken_of(const ShmPeers& ranks) {
  struct stat found = {};
  ::fstat(ranks.descriptor().get(), &found);
  return {found.st_blocks * 512, found.st_size};
}

TEST_CASE("Shared memory grows with the number of ranks; a lane takes memory when it is used",
          "[comm][shm]") {
  constexpr int64_t kMiB = 1 << 20;
  for (const int world_size : {2, 8, 32}) {
    INFO(world_size << " ranks");
    auto peers = testing::shm_peers(world_size, kLong);
    const auto [taken, all] = taken_of(*peers[0]);
    CHECK(taken <= (world_size + 2) * kMiB / 2);
    CHECK(all >= world_size * world_size * int64_t{Lane::kBytes});
    const ShmPeers& seen = *peers[0];
    const auto first = make_shm_transport(std::move(peers[0]));
    const auto second = make_shm_transport(std::move(peers[1]));
    std::vector<float> x(100, 1), y(100);
    for (int turn = 0; turn < 2; ++turn) {
      first->transfer(
          {{.op = Call::Op::send, .mine = {x.data(), 100, ElementType::f32}, .peer = 1}});
      second->transfer(
          {{.op = Call::Op::receive, .mine = {y.data(), 100, ElementType::f32}, .peer = 0}});
      CHECK(y == x);
      const int64_t lane = taken_of(seen).first - taken;
      CHECK((lane >= int64_t{Lane::kBytes} && lane <= int64_t{sizeof(Lane)} + 2 * 4096));
    }
  }
}

// --- Ranks that do not come ----------------------------------------------------------------------

std::string error_of_sum(HostTransport& rank) {
  std::vector<int64_t> x(3);
  return message_of<PeerLost>([&] {
    rank.run({.op = Call::Op::all_reduce, .mine = {x.data(), 3, ElementType::i64}, .all = {}}, 1);
  });
}

TEST_CASE("In shared memory a rank that does not come is missed in time, and its peers learn of it",
          "[comm][shm][tsan][row72]") {
  const Transports ranks = shm_transports(3, kShort);
  const auto begin = testing::Clock::now();
  std::vector<std::string> errors(2);
  testing::run_ranks(2,
                     [&](int rank) { errors[size_t(rank)] = error_of_sum(*ranks[size_t(rank)]); });
  const std::string late = "rank 2 did not answer within 0.3 s";
  CHECK(((errors[0] == late && errors[1] == late) ||
         (errors[0] == late && errors[1] == "rank 0 closed the connection") ||
         (errors[1] == late && errors[0] == "rank 1 closed the connection")));
  CHECK(seconds_since(begin) >= kShort);
  CHECK(seconds_since(begin) < kSoon);
  // From then on each says why it cannot go on.
  CHECK(error_of_sum(*ranks[0]) == errors[0]);
  CHECK(message_of<PeerLost>([&] { ranks[0]->transfer({}); }) == errors[0]);
}

TEST_CASE("In shared memory a rank that has gone is noticed at once", "[comm][shm][tsan][row67]") {
  Transports ranks = shm_transports(3);
  ranks[1].reset();
  const auto begin = testing::Clock::now();
  CHECK(error_of_sum(*ranks[0]) == "rank 1 closed the connection");
  CHECK(error_of_sum(*ranks[2]).ends_with(" closed the connection"));
  CHECK(seconds_since(begin) < kSoon);
}

TEST_CASE("What a rank sent through shared memory before it left can still be received",
          "[comm][shm][tsan]") {
  Transports ranks = shm_transports(2);
  std::vector<float> sent(100), come(100);
  std::iota(sent.begin(), sent.end(), 1.0F);
  ranks[0]->transfer(
      {{.op = Call::Op::send, .mine = {sent.data(), 100, ElementType::f32}, .all = {}, .peer = 1}});
  ranks[0].reset();
  const Call receive{
      .op = Call::Op::receive, .mine = {come.data(), 100, ElementType::f32}, .all = {}, .peer = 0};
  ranks[1]->transfer({receive});
  CHECK(come == sent);
  CHECK(message_of<PeerLost>([&] { ranks[1]->transfer({receive}); }) ==
        "rank 0 closed the connection");
}

#if defined(__SANITIZE_THREAD__)
TEST_CASE("ThreadSanitizer finds the race of ranks that do not release what they show",
          "[comm][shm][tsan]") {
  testing::ProcessResult result;
  // On busy cores the ranks may take turns so that something else orders what they do.
  for (int attempt = 0; attempt < 10 && result.status <= 0; ++attempt) {
    result = testing::run_process({testing::build_dir() + "/tests/unit/without-release"}, 60);
  }
  INFO(result.err);
  CHECK(result.status > 0);
  CHECK_THAT(result.err, ContainsSubstring("ThreadSanitizer: data race"));
}
#endif

// --- How ranks come to share memory --------------------------------------------------------------

/// What connect_shm() says on each of three ranks, one after the other.
std::vector<std::string> connected(const std::function<void(int rank)>& before = [](int) {}) {
  const testing::Stores stores(3);
  Transports ranks(3);
  return testing::run_ranks(3, [&](int rank) {
    before(rank);
    ranks[size_t(rank)] = connect_shm(stores[rank], kLong);
    int64_t x = 1;
    ranks[size_t(rank)]->run(
        {.op = Call::Op::all_reduce, .mine = {&x, 1, ElementType::i64}, .all = {}}, 1);
    require_equal(x, int64_t{3}, "sum");
  });
}

TEST_CASE("Ranks of one host come to share memory through a descriptor", "[comm][shm][tsan]") {
  CHECK(connected() == std::vector<std::string>(3));
}

/// A rank's store that takes its time, as where many ranks share a core.
class SlowStore final : public Store {
 public:
  /// `pause` is called before and after each meeting.
  SlowStore(Store& store, std::function<void(const std::string& name, bool after)> pause)
      : store_(store), pause_(std::move(pause)) {}
  int rank() const override { return store_.rank(); }
  int world_size() const override { return store_.world_size(); }
  Meeting meet(const std::string& name, const std::optional<std::string>& mine,
               const std::vector<int>& awaited, double timeout_seconds) override {
    pause_(name, false);
    Meeting met = store_.meet(name, mine, awaited, timeout_seconds);
    pause_(name, true);
    return met;
  }
  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  std::string get(const std::string& key, double timeout_seconds) override {
    return store_.get(key, timeout_seconds);
  }
  const JobKey& key() const override { return store_.key(); }
  void answer_within(double seconds) override { store_.answer_within(seconds); }
  Address local_address() const override { return store_.local_address(); }
  Address host_address() const override { return store_.host_address(); }
  bool is_host(int rank) const override { return store_.is_host(rank); }

 private:
  Store& store_;
  std::function<void(const std::string& name, bool after)> pause_;
};

TEST_CASE("A rank that has connected while another looked for it is not given up", "[comm][shm]") {
  const testing::Stores stores(2);
  // Rank 1 proves the job's key late. Rank 0 misses it, and looks what it says only after that.
  CHECK(testing::run_ranks(2, [&](int rank) {
          SlowStore slow(stores[rank], [&](const std::string& name, bool after) {
            const bool pauses = rank == 1 ? after && name.ends_with("a connection")
                                          : !after && name.ends_with("all connections");
            if (pauses) std::this_thread::sleep_for(std::chrono::milliseconds(200));
          });
          connect_shm(slow, kLong);
        }) == std::vector<std::string>(2));
}

TEST_CASE("Without memory for it all ranks hear why they cannot share any", "[comm][shm]") {
  const testing::FullDisk limit(4096);  // a limit that holds for this memory, too
  const std::vector<std::string> errors = connected();
  CHECK_THAT(errors[0], ContainsSubstring("rank 0: cannot get ") &&
                            ContainsSubstring(" KiB of shared memory: File too large"));
  CHECK(errors == std::vector<std::string>(3, errors[0]));
}

TEST_CASE("A rank in another network namespace cannot share memory, and all ranks hear of it",
          "[comm][shm]") {
  const std::vector<std::string> errors = connected([](int rank) {
    if (rank == 1) ::unshare(CLONE_NEWNET);
  });
  if (errors == std::vector<std::string>(3)) LOCKSTEP_SKIP("namespaces not permitted");
  CHECK(errors == std::vector<std::string>(
                      3, "rank 1: cannot reach rank 0's Unix socket: Connection refused"));
}

TEST_CASE("A rank of another user cannot share memory, and all ranks hear of it", "[comm][shm]") {
  if (::geteuid() != 0) LOCKSTEP_SKIP("only root becomes another user");
  const std::vector<std::string> errors = connected([](int rank) {
    if (rank == 2) ::syscall(SYS_setresuid, -1, 65534, -1);  // of this thread alone
  });
  CHECK(errors ==
        std::vector<std::string>(3, "rank 0: rank 2 has not connected, or as another user"));
}

// --- Its parts -----------------------------------------------------------------------------------

TEST_CASE("Shared memory is one piece for all who have its descriptor", "[comm][shm]") {
  const SharedMemory mine = SharedMemory::create(8192, 4096);
  const auto again = [&] { return Descriptor(::dup(mine.descriptor().get())); };
  const SharedMemory theirs = SharedMemory::open(again(), 8192, 4096);
  mine.data()[5000] = std::byte{7};
  CHECK(theirs.data() != mine.data());
  CHECK(theirs.data()[5000] == std::byte{7});
  CHECK(message_of<EnvironmentError>([&] { SharedMemory::open(again(), 4096, 4096); }) ==
        "a descriptor of 8192 bytes came, expected shared memory of 4096");
  CHECK(::ftruncate(mine.descriptor().get(), 0) != 0);  // nobody can take it away
  mine.set_aside(4096, 4096);
  CHECK(theirs.data()[5000] == std::byte{7});  // what it holds stays
  CHECK(message_of<EnvironmentError>([&] { mine.set_aside(8192, 4096); }) ==
        "cannot get 4 KiB of shared memory: Operation not permitted");
}

TEST_CASE("A Unix socket carries descriptors, and says so where there is none", "[comm][shm]") {
  const std::string name = fmt::format("lockstep-test-{}", ::getpid());
  const Deadline deadline(kSoon);
  CHECK(message_of<EnvironmentError>([&] { connect_under(name, "rank 3", deadline); }) ==
        "cannot reach rank 3's Unix socket: Connection refused");
  const Socket listener = listen_under(name);
  const Socket one = connect_under(name, "rank 3", deadline);
  const std::optional<Socket> other = accept_from(listener);
  REQUIRE(other);
  CHECK(has_same_user(*other));
  send_descriptor(one, SharedMemory::create(4096, 4096).descriptor());
  CHECK(SharedMemory::open(receive_descriptor(*other, deadline), 4096, 4096).data()[0] ==
        std::byte{0});
  send_all(*other, bytes_of("x"), deadline);
  CHECK_THAT(message_of<EnvironmentError>([&] { receive_descriptor(one, deadline); }),
             ContainsSubstring("rank 3 sent bytes, expected a descriptor"));
  CHECK(message_of<PeerLost>([&] { receive_descriptor(one, Deadline(0.01)); }) ==
        "rank 3 sent no descriptor within 0.01 s");
}

}  // namespace
}  // namespace lockstep
