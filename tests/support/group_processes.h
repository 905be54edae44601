#pragma once
// Groups of real processes, each a planted/group_member.cpp.

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/free_port.h"
#include "tests/support/process.h"

namespace lockstep::testing {

/// Environment variables; nullopt: not set.
using Variables = std::map<std::string, std::optional<std::string>>;

/// One process of a group.
struct RankProcess {
  Variables environment;
  Words words;             // of planted/group_member.cpp
  bool is_awaited = true;  // the others' end does not end it
};

struct RankResult {
  int status = -1;  // 128 + the signal that ended it; -1 if it did not end by itself
  std::string out{}, err{};
};

struct GroupResult {
  std::vector<RankResult> ranks{};  // as the processes were given
  double seconds = 0;
  bool timed_out = false;

  std::string story() const {
    std::string text = fmt::format("{:.2f} s{}", seconds, timed_out ? " (deadline passed)" : "");
    for (const RankResult& rank : ranks) {
      text += fmt::format("\nstatus {}\nstdout: {}\nstderr: {}", rank.status, rank.out, rank.err);
    }
    return text;
  }
};

inline Variables variables_of(int rank, int world_size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"LOCAL_WORLD_SIZE", {}},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"LOCKSTEP_DEBUG", {}},
          {"TORCHELASTIC_RUN_ID", {}},
          {"LOCKSTEP_JOB_SECRET", {}},
          {"LOCKSTEP_JOB_SECRET_FILE", {}},
          {"LOCKSTEP_LAUNCHER_KEY", {}},
          {"OMPI_MCA_orte_precondition_transports", {}}};
}

/// All ranks of a group with the same words.
inline std::vector<RankProcess> group_of(int world_size, const Words& words,
                                         int port = free_port()) {
  std::vector<RankProcess> processes;
  for (int rank = 0; rank < world_size; ++rank) {
    processes.push_back({variables_of(rank, world_size, port), words});
  }
  return processes;
}

inline std::string quoted(const Words& words) {
  std::string text;
  for (const std::string& word : words) text += " '" + word + "'";
  return text;
}

inline Words command_of(const RankProcess& process) {
  Words command{"env"};
  for (const auto& [name, value] : process.environment) {
    if (!value) command = command + Words{"-u", name};
  }
  for (const auto& [name, value] : process.environment) {
    if (value) command.push_back(name + "=" + *value);
  }
  return command + Words{build_dir() + "/tests/faults/group-member"} + process.words;
}

/// Runs all of them at the same time, under one shell: when those that are awaited have ended, the
/// rest is killed.
inline GroupResult run_group(const std::vector<RankProcess>& processes) {
  const TempDir folder;
  const auto file = [&](const char* kind, size_t i) {
    return (folder / fmt::format("{}.{}", kind, i)).string();
  };
  std::string script = "exec 2>/dev/null\n", wait = "wait";
  for (size_t i = 0; i < processes.size(); ++i) {
    script += fmt::format("{{ {} >{} 2>{}; echo $? >{}; }} &\n", quoted(command_of(processes[i])),
                          file("out", i), file("err", i), file("status", i));
    script += fmt::format("p{}=$!\n", i);
    if (processes[i].is_awaited) wait += fmt::format(" $p{}", i);
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto shell = run_process({"sh", "-c", script + wait}, kDeadline);
  GroupResult result{
      .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
      .timed_out = shell.timed_out};
  for (size_t i = 0; i < processes.size(); ++i) {
    const auto text = [&](const char* kind) {  // of one that was not awaited not all need be there
      const std::string path = file(kind, i);
      return std::filesystem::exists(path) ? read_text(path) : "";
    };
    const std::string status = text("status");
    RankResult rank{.out = text("out"), .err = text("err")};
    if (!status.empty()) rank.status = std::stoi(status);
    result.ranks.push_back(std::move(rank));
  }
  return result;
}

/// Checks that it ended with this status, one line on stderr with all `fragments`, and no stdout.
inline void check_error(const RankResult& rank, int status, const Words& fragments) {
  CHECK(rank.status == status);
  CHECK(rank.out.empty());
  CHECK_THAT(rank.err, Catch::Matchers::StartsWith("error: "));
  CHECK(rank.err.find('\n') == rank.err.size() - 1);
  for (const std::string& fragment : fragments)
    CHECK_THAT(rank.err, Catch::Matchers::ContainsSubstring(fragment));
}

}  // namespace lockstep::testing
