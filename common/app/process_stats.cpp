#include "common/app/process_stats.h"

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

namespace lockstep {

int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;  // Linux counts in KiB
}

double seconds_since_start() {
  // /proc/self/stat: behind the name in brackets follow the fields from number 3 on; number 22 is
  // the start in clock ticks since the machine booted.
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

}  // namespace lockstep
