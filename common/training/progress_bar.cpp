#include "common/training/progress_bar.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>

namespace lockstep {

ProgressBar::ProgressBar(int64_t samples, bool wanted)
    : samples_(samples), terminal_(wanted && isatty(STDOUT_FILENO) == 1) {}

void ProgressBar::show(int64_t samples_done, double seconds) {
  const double share = double(samples_done) / double(samples_);
  const int percent = static_cast<int>(100 * share);
  if (!terminal_ || percent == shown_percent_) return;
  shown_percent_ = percent;
  constexpr int kWidth = 40;
  const int filled = static_cast<int>(share * kWidth);
  fmt::print("\r[{:=<{}}{: <{}}] {:3}% {:.0f} samples/s ", "", filled, "", kWidth - filled, percent,
             double(samples_done) / seconds);
  std::fflush(stdout);
}

void ProgressBar::clear() {
  if (terminal_) fmt::print("\r{: <72}\r", "");
  shown_percent_ = -1;
}

}  // namespace lockstep
