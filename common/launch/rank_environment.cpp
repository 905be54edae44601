#include "common/launch/rank_environment.h"

#include <unistd.h>

#include <algorithm>
#include <random>

#include "common/core/error.h"
#include "common/system/flight_recorder.h"
#include "common/system/rank.h"
#include "common/system/secrets.h"

namespace lockstep {
namespace {

constexpr size_t kKeyBytes = 32;

void choose_port(MeetingPlace& meet) {
  meet.held = std::make_shared<const HeldPort>();
  meet.port = meet.held->number();
}

/// A key that only this start's ranks get. Several nodes cannot agree on one before they have met:
/// there the user gives it.
std::string new_key(const LaunchOptions& options) {
  std::string digits;
  if (options.nnodes > 1 || !proofs_availability().empty()) return digits;
  for (const char byte : random_bytes(kKeyBytes)) {
    digits += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return digits;
}

}  // namespace

MeetingPlace first_meeting_place(const LaunchOptions& options) {
  MeetingPlace meet;
  meet.address = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  meet.port = options.master_port;
  if (meet.port == 0) choose_port(meet);
  // Nodes cannot agree on a random name before they have met.
  std::random_device random;
  meet.run_id = options.nnodes > 1 ? fmt::format("{}:{}", meet.address, meet.port)
                                   : fmt::format("{:08x}{:08x}", random(), random());
  meet.key = new_key(options);
  return meet;
}

MeetingPlace next_meeting_place(const LaunchOptions& options, const MeetingPlace& before) {
  MeetingPlace meet = before;
  if (options.master_port == 0) choose_port(meet);
  meet.key = new_key(options);
  ++meet.restart;
  return meet;
}

int global_rank(const LaunchOptions& options, int local_rank) {
  return options.node_rank * options.nproc_per_node + local_rank;
}

std::vector<std::string> rank_environment(const LaunchOptions& options, const MeetingPlace& meet,
                                          int local_rank) {
  std::vector<std::string> all{
      fmt::format("RANK={}", global_rank(options, local_rank)),
      fmt::format("LOCAL_RANK={}", local_rank),
      fmt::format("WORLD_SIZE={}", options.world_size()),
      fmt::format("LOCAL_WORLD_SIZE={}", options.nproc_per_node),
      fmt::format("GROUP_RANK={}", options.node_rank),
      fmt::format("MASTER_ADDR={}", meet.address),
      fmt::format("MASTER_PORT={}", meet.port),
      fmt::format("TORCHELASTIC_RESTART_COUNT={}", meet.restart),
      fmt::format("TORCHELASTIC_MAX_RESTARTS={}", options.max_restarts),
      fmt::format("TORCHELASTIC_RUN_ID={}", meet.run_id),
      fmt::format("{}={}", kLauncherPipe, meet.launcher_pipe),
      fmt::format("{}={}", kFlightMemory, meet.flight_memory),
      fmt::format("{}={}", kLauncherKey, meet.key),
  };
  const size_t own = all.size();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const auto same_name = [&](const std::string& variable) {
      return text.starts_with(variable.substr(0, variable.find('=') + 1));
    };
    if (std::none_of(all.begin(), all.begin() + ptrdiff_t(own), same_name)) all.push_back(text);
  }
  return all;
}

}  // namespace lockstep
