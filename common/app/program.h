#pragma once
// The frame of every main(): parse, run, and one place where errors become a line and a status.

#include <functional>

#include "common/options/options.h"

namespace lockstep {

/// Runs a stage's program: `train` gets the parsed common options; `stage.add_options` chose where
/// the stage's own go. Returns the exit status of main: 0; an Error's own status, after its text on
/// one line of stderr; 1 for any other exception. An exception that leaves `train` ends the process
/// at once, at the point where it was thrown: nothing is unwound, so nothing waits for streams or
/// peers that may never come. With --baseline `train` runs in child processes only (verdict.h).
int run_program(const StageInfo& stage, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train);

}  // namespace lockstep
