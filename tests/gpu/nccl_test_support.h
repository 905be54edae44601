#pragma once
// Ranks that meet by NCCL: threads of this process, each with a GPU of its own.

#include <filesystem>

#include "common/options/report.h"
#include "tests/gpu/gpu_test_support.h"
#include "tests/support/comm_trial.h"
#include "tests/support/process.h"
#include "tests/support/rank_threads.h"
#include "tests/support/stage.h"

namespace lockstep::testing::nccl {

constexpr auto kCuda = DeviceId::Kind::cuda;

/// Faults can be planted in the CUDA model only.
#define LOCKSTEP_NEEDS_THE_MODEL()                                                             \
  if (!::lockstep::testing::is_model(*::lockstep::open_device(::lockstep::testing::kGpu, {}))) \
  LOCKSTEP_SKIP("not the CUDA model: a real NCCL fails when it wants")

/// Rank `rank`, on the GPU of that number.
inline Ranks nccl_rank(int rank, int world_size, const std::string& id,
                       double timeout_seconds = kLong, const DeviceOptions& options = {}) {
  return Ranks({kCuda, rank}, rank, world_size, options, [&](Device& device) {
    return make_nccl_rank(device, rank, world_size, id, timeout_seconds);
  });
}

/// Calls body(ranks, me) for each rank, on its thread. Returns their errors, as run_ranks() does.
template <class Body>
std::vector<std::string> run_nccl_ranks(int world_size, Body body, double timeout_seconds = kLong,
                                        const DeviceOptions& options = {}) {
  const std::string id = nccl_unique_id();
  return run_ranks(world_size, [&](int me) {
    Ranks ranks = nccl_rank(me, world_size, id, timeout_seconds, options);
    body(ranks, me);
  });
}

/// The result of run_nccl_ranks() if all is well.
inline std::vector<std::string> no_errors(int world_size) {
  return std::vector<std::string>(static_cast<size_t>(world_size));
}

/// Runs the hidden case with this tag in a process of its own: ranks that lose another rank end
/// their process. The case begins with report_uncaught_errors(), as programs do. A rank's own error
/// must leave its thread, too: so its work is noexcept. Returns how the process ended. `variables`
/// are added to the environment.
inline ProcessResult run_hidden(const std::string& tag,
                                std::vector<std::pair<std::string, std::string>> variables = {}) {
  variables.emplace_back("LOCKSTEP_TEST_LOG", "/dev/null");
  return run_process({std::filesystem::read_symlink("/proc/self/exe"), tag}, kLong, variables);
}

/// Checks that the process ended with the status of a lost peer and one line with this text.
inline void check_lost(const ProcessResult& ended, const std::string& text) {
  INFO(story(ended));
  CHECK_FALSE(ended.timed_out);
  CHECK(ended.status == 2);
  CHECK_THAT(ended.err, Catch::Matchers::ContainsSubstring("error: "));
  CHECK(ended.err.find("\nerror: ") == std::string::npos);
  CHECK_THAT(ended.err, Catch::Matchers::ContainsSubstring(text));
}

/// Holds a thread until the process ends.
[[noreturn]] inline void wait_for_the_end() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

/// Throws BadInput unless the tensor has these numbers.
template <class T>
void require_numbers(const BasicTensor<T>& x, const std::vector<T>& expected) {
  const std::vector<T> found = x.to_host();
  const auto differs =
      std::mismatch(found.begin(), found.end(), expected.begin(), expected.end()).first;
  require(found == expected, "{} numbers, number {} of them is wrong", found.size(),
          differs - found.begin());
}

}  // namespace lockstep::testing::nccl
