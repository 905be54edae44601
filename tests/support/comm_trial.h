#pragma once
// Ranks under test, and collectives run on them the way training runs them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/comm/host_communicator.h"
#include "common/kernels/devices.h"
#include "tests/support/catch.h"
#include "tests/support/comm_cases.h"

namespace lockstep::testing {

/// cpu:0 to cpu:W-1, or cuda:0 to cuda:W-1.
inline std::vector<DeviceId> device_ids(int world_size, DeviceId::Kind kind = DeviceId::Kind::cpu) {
  std::vector<DeviceId> ids;
  for (int rank = 0; rank < world_size; ++rank) ids.push_back({kind, rank});
  return ids;
}

/// The ranks of a group, each with a stream of its own.
struct Ranks {
  /// Makes all ranks in this process, on CPU devices. connect(rank) connects one rank with the
  /// others; all these calls run at the same time.
  Ranks(
      int world_size, const std::function<std::shared_ptr<HostTransport>(int rank)>& connect,
      const std::function<std::optional<RollCall>(int rank)>& roll_call = [](int) {
        return std::optional<RollCall>();
      }) {
    for (const DeviceId& id : device_ids(world_size)) {
      owned.push_back(open_device(id, {}));
      devices.push_back(owned.back().get());
      streams.push_back(devices.back()->create_stream(fmt::format("rank {}", streams.size())));
    }
    std::vector<std::future<std::shared_ptr<HostTransport>>> transports;
    for (int rank = 0; rank < world_size; ++rank) {
      transports.push_back(std::async(std::launch::async, connect, rank));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      comms.push_back(std::make_unique<HostCommunicator>(rank, world_size, transports[rank].get(),
                                                         roll_call(rank)));
    }
  }

  /// Makes one rank, on `id`; the other ranks are elsewhere. Streams with their numbers belong to
  /// this device, too, so a test need not know where ranks are.
  Ranks(const DeviceId& id, int rank, int world_size, const DeviceOptions& options,
        const std::function<std::unique_ptr<Communicator>(Device&)>& connect) {
    owned.push_back(open_device(id, options));
    devices.assign(static_cast<size_t>(world_size), owned.back().get());
    for (int i = 0; i < world_size; ++i) {
      streams.push_back(owned.back()->create_stream(fmt::format("rank {}", i)));
    }
    comms.resize(static_cast<size_t>(world_size));
    comms[rank] = connect(*owned.back());
  }

  int size() const { return static_cast<int>(streams.size()); }
  bool is_here(size_t rank) const { return comms[rank] != nullptr; }
  /// Calls f(communicator, stream) for every rank, as one group.
  template <class F>
  void together(F f) const {
    for (const auto& comm : comms) {
      if (comm == nullptr) continue;
      comm->open_group();
      f(*comm, streams[comm->rank()]);
      comm->close_group();
    }
  }
  void synchronize() const {
    for (const Stream& stream : streams) stream.synchronize();
  }

  std::vector<std::unique_ptr<Device>> owned;
  std::vector<Device*> devices;                      // by rank
  std::vector<Stream> streams;                       // by rank
  std::vector<std::unique_ptr<Communicator>> comms;  // by rank; null: not here
};

/// One tensor per rank, rank r's full of `first` + r.
template <class T>
std::vector<BasicTensor<T>> numbered(const Ranks& ranks, int64_t count, T first) {
  std::vector<BasicTensor<T>> tensors;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<T> values(static_cast<size_t>(count), T(first + T(rank)));
    tensors.push_back(BasicTensor<T>::from_host(ranks.streams[rank], {count}, values));
  }
  return tensors;
}

/// The bytes that each rank has sent so far.
inline std::vector<int64_t> bytes_sent(const Ranks& ranks) {
  std::vector<int64_t> sent(static_cast<size_t>(ranks.size()));
  ranks.synchronize();
  ranks.together(
      [&](const Communicator& comm, Stream) { sent[size_t(comm.rank())] = comm.bytes_sent(); });
  return sent;
}

/// The bytes that each rank sends for one collective of n elements, as counted.
template <class T = float>
std::vector<int64_t> bytes_sent_for(const Ranks& ranks, const Collective& collective, int64_t n,
                                    int root) {
  const auto memory = numbered<T>(ranks, (ranks.size() + 1) * n, T(1));
  const std::vector<int64_t> before = bytes_sent(ranks);
  ranks.together([&](Communicator& comm, Stream stream) {
    collective.issue(comm, stream, memory[size_t(comm.rank())], n, root);
  });
  std::vector<int64_t> sent = bytes_sent(ranks);
  for (size_t rank = 0; rank < sent.size(); ++rank) sent[rank] -= before[rank];
  return sent;
}

/// The same by the formula of a ring.
inline std::vector<int64_t> ring_bytes_for(const Collective& collective, int64_t n, int root,
                                           int world_size) {
  Call call{.op = collective.op,
            .mine = {nullptr, n, ElementType::f32},
            .all = {nullptr, world_size * n, ElementType::f32},
            .peer = root};
  std::vector<int64_t> sent;
  for (int rank = 0; rank < world_size; ++rank) {
    if (collective.op == Call::Op::receive)
      call.op = rank == root ? Call::Op::receive : Call::Op::send;
    sent.push_back(call.ring_bytes(rank, world_size));
  }
  return sent;
}

/// One group of two ranks in which each call needs the result of the one before.
inline void check_dependent_calls(const Ranks& ranks) {
  using Values = std::vector<int64_t>;
  const auto x = numbered<int64_t>(ranks, 2, 1), all = numbered<int64_t>(ranks, 4, -10);
  const auto aside = numbered<int64_t>(ranks, 1000, 5);
  ranks.together([&](Communicator& comm, Stream stream) {
    const int me = comm.rank();
    comm.all_gather(stream, x[me], all[me]);                // 1, 2 everywhere
    comm.all_reduce(stream, all[me]);                       // 2, 4 everywhere
    comm.all_reduce(stream, aside[me]);                     // 11, 11: for nobody else
    comm.reduce_scatter(stream, all[me], x[me]);            // 4, 8
    comm.broadcast(stream, Elements(x[me]).part(1, 1), 1);  // second elements: 8, 8
    if (me == 0) comm.send(stream, x[0], 1);                // first elements: 4, 4
    if (me == 1) comm.receive(stream, x[1], 0);
    comm.barrier(stream);
    comm.all_reduce(stream, x[me]);
  });
  for (const auto& values : all) CHECK(values.to_host() == Values{2, 2, 4, 4});
  for (const auto& values : aside) CHECK(values.to_host() == Values(1000, 11));
  for (const auto& values : x) CHECK(values.to_host() == Values{8, 16});
}

/// Runs collectives on one piece of memory per rank, the way training does: each is enqueued
/// between work that makes its input and work that overwrites everything it touched, and the host
/// never waits. A collective that starts too early or ends too late gives wrong numbers.
template <class T>
class Trial {
 public:
  using Values = std::vector<T>;

  /// n elements in each rank's share.
  Trial(Ranks& ranks, int64_t n) : ranks_(ranks), n_(n) {
    const int64_t elements = (ranks.size() + 1) * n;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      Values numbers(static_cast<size_t>(elements));
      for (int64_t i = 0; i < elements; ++i) numbers[i] = number<T>(rank, i);
      const auto put = [&](const Values& values) {
        return BasicTensor<T>::from_host(ranks.streams[rank], {elements}, values);
      };
      input_.push_back(put(numbers));
      garbage_.push_back(put(Values(numbers.size(), T(77))));
      memory_.push_back(put(Values(numbers.size(), T(78))));
      before_.push_back(std::move(numbers));
    }
  }

  /// Enqueues a group with one collective.
  void enqueue(const Collective& collective, int root = 0) {
    const auto copy = [&](int rank, const BasicTensor<T>& from, const BasicTensor<T>& to) {
      ranks_.streams[rank].copy(to.data(), from.data(), to.bytes());
    };
    Execution run{collective.name(root), collective.serial(before_, n_, root), {}};
    for (int rank = 0; rank < ranks_.size(); ++rank) copy(rank, input_[rank], memory_[rank]);
    ranks_.together([&](Communicator& comm, Stream stream) {
      collective.issue(comm, stream, memory_[comm.rank()], n_, root);
    });
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      run.found.push_back(BasicTensor<T>::empty(ranks_.streams[rank], memory_[rank].shape()));
      copy(rank, memory_[rank], run.found[rank]);
      copy(rank, garbage_[rank], memory_[rank]);
    }
    runs_.push_back(std::move(run));
  }
  /// Enqueues everything that the ranks can do: with every root, or with the last one only.
  void enqueue_all(bool every_root = true) {
    const int last = ranks_.size() - 1;
    for (const Collective& collective : collectives(Elements(memory_[0]).type, ranks_.size())) {
      const int first = every_root && collective.has_root() ? 0 : last;
      for (int root = first; root <= last; ++root) enqueue(collective, root);
    }
  }

  /// Waits. Compares all enqueued since the last call with the serial reference. Returns the first
  /// difference in words, or "". Sums may be off by `tolerance`; 0: all bits are right.
  std::string first_fault(double tolerance = 0) {
    std::string fault = runs_.empty() ? "nothing was run" : "";
    for (const Execution& run : runs_) {
      for (size_t rank = 0; fault.empty() && rank < run.found.size(); ++rank) {
        if (!ranks_.is_here(rank)) continue;
        fault = difference(run.found[rank].to_host(), run.expected[rank], tolerance);
        if (!fault.empty()) fault = fmt::format("{}: rank {}, {}", run.name, rank, fault);
      }
    }
    runs_.clear();
    return fault;
  }

 private:
  struct Execution {
    std::string name;
    std::vector<Values> expected;       // by rank
    std::vector<BasicTensor<T>> found;  // by rank
  };

  static std::string difference(const Values& found, const Values& expected, double tolerance) {
    const size_t bytes = found.size() * sizeof(T);
    if (bytes == 0 || std::memcmp(found.data(), expected.data(), bytes) == 0) return {};
    const T *x = found.data(), *y = expected.data();  // plain pointers: test code is not optimised
    const double allowed = std::is_integral_v<T> ? 0 : tolerance;
    for (size_t i = 0; i < found.size(); ++i) {
      if (x[i] == y[i] || (allowed > 0 && std::abs(double(x[i]) - double(y[i])) <= allowed))
        continue;
      return fmt::format("element {} of {}: found {}, expected {}", i, found.size(), +x[i], +y[i]);
    }
    return tolerance > 0 ? "" : "zeros of another sign";
  }

  Ranks& ranks_;
  int64_t n_;
  std::vector<Values> before_;                            // by rank: [W n + n]
  std::vector<BasicTensor<T>> input_, garbage_, memory_;  // by rank: [W n + n]
  std::vector<Execution> runs_;
};

/// The first difference in whatever two ranks can do with shares of so many elements of any type;
/// "" if there is none. Two numbers have one sum, in whatever order.
inline std::string first_fault_of_all(Ranks& ranks, const std::vector<int64_t>& counts) {
  std::string fault;
  const auto run = [&](auto zero, int64_t n) {
    Trial<decltype(zero)> trial(ranks, n);
    trial.enqueue_all();
    fault = trial.first_fault();
    if (!fault.empty()) fault = fmt::format("shares of {}, {}", n, fault);
  };
  for (const int64_t n : counts) {
    if (fault.empty()) run(float(), n);
    if (fault.empty()) run(double(), n);
    if (fault.empty()) run(int64_t(), n);
    if (fault.empty()) run(Bf16(), n);
    if (fault.empty()) run(Fp16(), n);
  }
  return fault;
}

}  // namespace lockstep::testing
