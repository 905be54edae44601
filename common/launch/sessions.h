#pragma once
// Sessions of processes: a rank, and everything it starts that does not leave on purpose.
//
// A rank leads a session of its own, and with it a process group. Signals go to groups; but shells
// with job control and programs like timeout(1) put what they start into further groups, and
// nothing shows whether a group is empty once its leader has died. So the members are looked up in
// /proc, by session. Only a process that makes a session of its own (a daemon) gets away.

#include <sys/types.h>

#include <vector>

namespace lockstep {

/// Whether a process of one of these sessions is alive. A zombie is not.
bool any_alive(const std::vector<pid_t>& leaders);

/// Sends a signal to all processes of the sessions. A leader's id must not have passed to another
/// process: call it before the leader's parent has waited for the leader, or immediately after.
void signal_sessions(const std::vector<pid_t>& leaders, int signal);

/// Kills all processes of the sessions and returns when none is alive: at once, unless the kernel
/// keeps one alive, which is given two seconds.
void kill_sessions(const std::vector<pid_t>& leaders);

}  // namespace lockstep
