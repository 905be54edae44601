#include "common/launch/sessions.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/system/descriptor.h"

namespace lockstep {
namespace {

struct Member {
  pid_t pid = 0, group = 0, session = 0;
  bool alive = false;
};

Member read_member(const char* pid) {
  std::array<char, 32> path{};
  std::snprintf(path.data(), path.size(), "/proc/%.16s/stat", pid);
  const Descriptor file(::open(path.data(), O_RDONLY | O_CLOEXEC));
  std::array<char, 512> text{};
  if (file.get() < 0 || ::read(file.get(), text.data(), text.size() - 1) <= 0) return {};
  // "12 (a name) S parent group session ... threads ...", proc(5). A name may hold anything, even
  // parentheses, so search from the end.
  const char* behind_name = std::strrchr(text.data(), ')');
  Member member;
  char state = 'X';
  int threads = 0;
  if (behind_name == nullptr ||
      std::sscanf(behind_name + 1,
                  " %c %*d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d", &state,
                  &member.group, &member.session, &threads) != 4) {
    return {};
  }
  member.pid = static_cast<pid_t>(std::strtol(pid, nullptr, 10));
  // While threads that still hold the process's sockets are dying, its first thread is a zombie.
  member.alive = (state != 'Z' && state != 'X') || threads > 1;
  return member;
}

std::vector<Member> living_members(const std::vector<pid_t>& leaders) {
  std::vector<Member> members;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), ::closedir);
  while (folder) {
    const dirent* entry = ::readdir(folder.get());
    if (entry == nullptr) break;
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    const Member member = read_member(entry->d_name);
    if (member.alive && std::ranges::count(leaders, member.session) > 0) members.push_back(member);
  }
  return members;
}

}  // namespace

bool any_alive(const std::vector<pid_t>& leaders) { return !living_members(leaders).empty(); }

void signal_sessions(const std::vector<pid_t>& leaders, int signal) {
  // The groups first: whatever a group starts meanwhile gets the signal as well.
  for (const pid_t leader : leaders) ::kill(-leader, signal);
  for (const Member& member : living_members(leaders)) {
    if (std::ranges::count(leaders, member.group) == 0) ::kill(member.pid, signal);
  }
}

void kill_sessions(const std::vector<pid_t>& leaders) {
  for (const pid_t leader : leaders) ::kill(-leader, SIGKILL);
  for (int rounds = 0; rounds < 1000; ++rounds) {
    const std::vector<Member> members = living_members(leaders);
    if (members.empty()) return;
    for (const Member& member : members) ::kill(member.pid, SIGKILL);
    const timespec pause{.tv_sec = 0, .tv_nsec = 2'000'000};
    ::nanosleep(&pause, nullptr);
  }
}

}  // namespace lockstep
