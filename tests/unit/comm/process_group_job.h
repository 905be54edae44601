#pragma once
// Ranks of a process group in one process.

#include "common/comm/process_group.h"

#include <functional>
#include <string>
#include <vector>

#include "common/comm/host_transport.h"
#include "common/core/error.h"
#include "common/kernels/devices.h"
#include "tests/support/free_port.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"

namespace lockstep::testing::group {

/// Runs the ranks of a job, each on a thread with its own group and CPU device; returns errors.
class Job {
 public:
  explicit Job(int world_size, std::string backend = "tcp", double timeout_seconds = kLong)
      : world_size_(world_size),
        options_{.backend = std::move(backend), .timeout_seconds = timeout_seconds} {}

  /// Changes the options of one rank.
  std::function<void(int rank, ProcessGroupOptions& options)> options_of_rank = [](int, auto&) {};

  std::vector<std::string> run(const std::function<void(ProcessGroup& group)>& body) const {
    const int port = free_port();
    return run_ranks(world_size_, [&](int rank) {
      ProcessGroupOptions options = options_;
      options_of_rank(rank, options);
      ProcessGroup group(contract_of(rank, world_size_, port), options);
      body(group);
    });
  }
  /// The same on connected ranks.
  std::vector<std::string> run_connected(
      const std::function<void(ProcessGroup& group, Communicator& ranks, Stream stream)>& body)
      const {
    return run([&](ProcessGroup& group) {
      const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
      const Stream stream = device->create_stream("communication");
      const std::unique_ptr<Communicator> ranks = group.connect(*device);
      body(group, *ranks, stream);
    });
  }

 private:
  int world_size_;
  ProcessGroupOptions options_;
};

/// The backends for CPU devices that this build has.
inline std::vector<std::string> host_backends() {
  std::vector<std::string> all{"shm", "tcp"};
  if (gloo_availability().empty()) all.push_back("gloo");
  return all;
}

/// Runs a collective of so many numbers, and waits for its end.
inline void reduce(Communicator& ranks, Stream stream, int64_t count = 10) {
  const auto x = BasicTensor<float>::from_host(stream, {count},
                                               std::vector<float>(static_cast<size_t>(count), 1));
  ranks.all_reduce(stream, x);
  stream.synchronize();
}

}  // namespace lockstep::testing::group
