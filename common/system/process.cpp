#include "common/system/process.h"

#include <fmt/ranges.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>
#include <sstream>

namespace lockstep {
namespace {

/// A word of a command, quoted for a shell.
std::string quoted(const std::string& word) {
  const auto harmless = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::strchr("_./:=,+@%-", c) != nullptr;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), harmless)) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

std::string typed_command_line() {
  std::vector<std::string> words = own_command_line();
  std::transform(words.begin(), words.end(), words.begin(), quoted);
  return fmt::format("{}", fmt::join(words, " "));
}

int64_t peak_rss_bytes() {
  // VmHWM, proc(5): getrusage() would count what this process was before it became this program.
  std::ifstream file("/proc/self/status");
  std::string word;
  int64_t kib = 0;
  while (file >> word && word != "VmHWM:") continue;
  file >> kib;
  return kib * 1024;
}

double seconds_since_start() {
  // /proc/self/stat: the fields from number 3 on follow the name in brackets; number 22 is the
  // start in clock ticks since the machine booted.
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  double ticks = 0;
  fields >> ticks;
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  const double uptime = double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  return uptime - ticks / double(sysconf(_SC_CLK_TCK));
}

std::optional<ThreadTimes> thread_times(int thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/schedstat");
  double computed_ns = 0, queued_ns = 0;
  if (!(file >> computed_ns >> queued_ns)) return std::nullopt;
  return ThreadTimes{1e-9 * computed_ns, 1e-9 * queued_ns};
}

double process_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

}  // namespace lockstep
