#pragma once
// Launchers under test, and the processes that are left when they are gone.

#include <fmt/format.h>
#include <sys/types.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <sstream>
#include <string>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/process.h"
#include "tests/support/stage.h"
#include "tests/support/tasks.h"

namespace lockstep::testing {

inline Words lines_of(const std::string& text) {
  Words lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// The time limit, in tests, for what the launcher promises in `seconds` on an idle machine: tests
/// run next to compilers and other people's work.
inline double promised(double seconds) { return 5 * seconds; }

/// Checks that half of a campaign's turns take less than `seconds`; not with slow sanitizers.
inline void check_promise(std::vector<double> taken, [[maybe_unused]] double seconds) {
  std::ranges::nth_element(taken, taken.begin() + std::ptrdiff_t(taken.size() / 2));
#if !defined(__SANITIZE_ADDRESS__)
  if (full_campaign()) CHECK(taken[taken.size() / 2] < seconds);
#endif
}

/// Whether is_true() is true now, or becomes true within `seconds`.
inline bool soon(double seconds, const std::function<bool()>& is_true) {
  for (const auto begin = Clock::now(); !is_true();
       std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
    if (seconds_since(begin) > seconds) return false;
  }
  return true;
}

// Functions for the scripts of ranks.
constexpr const char* kFunctions = R"(
is_rank() { [ "$RANK" = "$1" ]; }
announce() { echo "$$" >"$DIR/.$1.$RANK"; mv "$DIR/.$1.$RANK" "$DIR/$1.$RANK"; }
await() { until [ -e "$DIR/$1" ]; do sleep 0.01; done; }
deaf() { trap '' TERM INT HUP; while :; do sleep 1; done; }
)";

/// A folder in which launchers run, and a mark in the environment of everything they start.
class Jobs {
 public:
  std::string launcher() const { return build_dir() + "/common/launch/launch"; }
  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }
  Words names() const { return folder_.names(); }
  bool has(const std::string& name) const { return std::filesystem::exists(folder_ / name); }
  std::string text(const std::string& name) const { return read_text(folder_ / name); }
  /// Whether a file with these words is soon there.
  bool soon_says(const std::string& name, const std::string& words) const {
    return soon(kDeadline,
                [&] { return has(name) && text(name).find(words) != std::string::npos; });
  }

  /// Runs a command until it ends.
  ProcessResult run_words(const Words& words, double deadline_seconds = kDeadline) const {
    return run_process(words, deadline_seconds, {{"LAUNCH_TEST", mark()}, {"DIR", folder_.path()}});
  }
  /// Launches ranks that are shell scripts. No process may be left when the launcher is gone.
  ProcessResult run(const Words& options, const std::string& script,
                    const Words& prefix = {}) const {
    const ProcessResult result =
        run_words(prefix + Words{launcher()} + options + Words{"sh", "-c", kFunctions + script});
    UNSCOPED_INFO(story(result));
    CHECK_FALSE(result.timed_out);
    CHECK(processes() == Words{});
    return result;
  }
  /// Launches ranks that run at the same time as this test.
  std::future<ProcessResult> begin(const Words& options, const Words& program,
                                   double deadline_seconds = kDeadline) const {
    return std::async(std::launch::async, [=, this] {
      return run_words(Words{launcher()} + options + program, deadline_seconds);
    });
  }
  bool all_have(const std::string& name, int ranks) const {
    for (int rank = 0; rank < ranks; ++rank) {
      if (!has(fmt::format("{}.{}", name, rank))) return false;
    }
    return true;
  }

  /// Everything with this job's mark that is alive: ids and names.
  Words processes() const {
    Words found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string id = entry.path().filename();
      if (id.find_first_not_of("0123456789") != std::string::npos) continue;
      std::ifstream environment(entry.path() / "environ", std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(environment), {}};
      if (text.find("LAUNCH_TEST=" + mark()) == std::string::npos) continue;
      std::string name;
      std::getline(std::ifstream(entry.path() / "comm"), name);
      found.push_back(id + " " + name);
    }
    return found;
  }

  /// The ids of the job's ranks that run `program`, by rank, once there are `count`; empty if that
  /// takes too long.
  std::vector<pid_t> ranks(size_t count, const std::string& program) const {
    std::map<std::string, pid_t> found;
    const std::string name = program.substr(0, 15);  // as the kernel shortens it
    soon(kDeadline, [&] {
      found.clear();
      for (const std::string& process : processes()) {
        if (process.find(name) == std::string::npos) continue;
        const std::string id = process.substr(0, process.find(' '));
        std::ifstream file("/proc/" + id + "/environ", std::ios::binary);
        for (std::string entry; std::getline(file, entry, '\0');) {
          if (entry.starts_with("RANK=")) found[entry] = std::stoi(id);
        }
      }
      return found.size() == count;
    });
    std::vector<pid_t> pids;
    for (const auto& [rank, pid] : found) pids.push_back(pid);
    return pids.size() == count ? pids : std::vector<pid_t>();
  }

 private:
  std::string mark() const { return folder_.path(); }

  TempDir folder_;
};

/// Checks that a run stopped after 3 of 6 steps goes on as if it had not stopped, and its log, too.
/// Each parameter has its own count of steps, because steps 1, 3 and 5 leave a layer out. `command`
/// trains on 120 samples.
inline void check_goes_on(const Jobs& jobs, const Words& command) {
  const auto run = [&](const Words& options) {
    const ProcessResult result =
        jobs.run_words(command +
                       Words{"--batch-size", "12", "--log-interval", "2", "--model", "seed-skip",
                             "--weight-decay", "0.1"} +
                       options);
    INFO(story(result));
    REQUIRE(result.status == 0);
    return result.out;
  };
  run({"--max-steps", "6", "--save", jobs / "straight"});
  const Words resumed{"--checkpoint-dir", jobs / "saved", "--resume", "auto"};
  run(resumed + Words{"--max-steps", "3"});
  const std::string on = run(resumed + Words{"--max-steps", "6", "--save", jobs / "resumed"});
  CHECK((jobs.text("resumed") == jobs.text("straight")));
  CHECK_THAT(on, Catch::Matchers::ContainsSubstring("Train Epoch: 1 [48/120 (40%)]"));
  CHECK(on.find("[0/120") == std::string::npos);
}

}  // namespace lockstep::testing
