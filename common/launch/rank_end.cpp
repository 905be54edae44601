#include "common/launch/rank_end.h"

#include <signal.h>

#include <algorithm>
#include <cstring>

#include "common/core/error.h"

namespace lockstep {
namespace {

/// How likely this end is a consequence of another one: the lowest is the cause.
int suspicion(const RankEnd& end) {
  if (!end.failed()) return 4;
  if (end.may_be_answer()) return end.signal == SIGPIPE ? 2 : 3;
  return end.signal != 0 ? 0 : 1;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : "a real-time signal";
}

}  // namespace

int RankEnd::exit_status() const {
  if (stopped) return PeerLost("").exit_status();
  return signal != 0 ? 128 + signal : status;
}

bool RankEnd::may_be_answer() const {
  return signal == SIGPIPE || (signal == 0 && status == PeerLost("").exit_status());
}

std::string RankEnd::how() const {
  if (stopped) return "was stopped by a signal (SIGSTOP or its kind)";
  if (signal == 0) return fmt::format("exited with status {}", status);
  return fmt::format("was killed by signal {} ({})", signal, signal_name(signal));
}

std::string RankEnd::text() const {
  return fmt::format("rank {} ({}{}pid {}) {}{}", rank, place, place.empty() ? "" : "; ", pid,
                     how(), stopped ? ", and given up" : "");
}

const RankEnd& cause_of(const std::vector<RankEnd>& ends) {
  // The first of the smallest: the earliest among equals.
  return *std::ranges::min_element(ends, {}, suspicion);
}

}  // namespace lockstep
