#pragma once
// Starts a program as several ranks, as torchrun does, and ends them together.

#include <string>
#include <vector>

#include "common/launch/launch_options.h"

namespace lockstep {

/// Runs `program` (its name and arguments) once per rank of this node and returns when no process
/// of any rank is left. Returns 0 if all ended with status 0.
///
/// When a rank fails, the others are stopped: SIGTERM, after the grace period SIGKILL. One line on
/// stderr names the rank that was the cause, and the result is its status, or 128 + its signal.
/// Before that, all ranks are started again as often as the options allow.
///
/// SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks, and then end this process; a
/// second one kills the ranks at once. If this process itself is killed, the ranks are, too.
///
/// Throws BadInput or EnvironmentError, with no rank running. Causes: options that make no sense, a
/// program that cannot be executed, output files that cannot be written. Call it before this
/// process has threads; no other children of this process may end meanwhile.
int launch(const LaunchOptions& options, const std::vector<std::string>& program);

}  // namespace lockstep
