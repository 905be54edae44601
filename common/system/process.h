#pragma once
// Facts that the operating system knows about this process: its command line, memory and times.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// The command line with which this process was started, word by word.
std::vector<std::string> own_command_line();
/// The same as typed into a shell: for people, and for errors that propose a command.
std::string typed_command_line();

/// The most memory that this process ever had in RAM, in bytes.
int64_t peak_rss_bytes();
/// Seconds since this process was started (resolution 10 ms).
double seconds_since_start();

/// Seconds of a thread so far.
struct ThreadTimes {
  double computed = 0;  // it had a core
  double queued = 0;    // it was ready to go on, and waited for a core
};
/// The times of a thread of this process, by the system's number. Nothing if there is no such
/// thread, or the system does not keep these times (schedstat, proc(5)).
std::optional<ThreadTimes> thread_times(int thread);
/// Seconds for which this process's threads had a core, added up over the threads.
double process_seconds();

}  // namespace lockstep
