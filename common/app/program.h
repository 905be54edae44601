#pragma once
// The frame of every main(): parse, run, and one place where errors become a line and a status.

#include <functional>

#include "common/app/options.h"

namespace lockstep {

/// Runs a stage's program. `name` is the stage ("01-single-gpu"), `summary` the first line of
/// --help; `train` gets the parsed options, to which `add_stage_options` may add. Returns the exit
/// status of main: 0; an Error's own status, after its text on one line of stderr; 1 for any other
/// exception. An exception that `train` lets through ends the process at once, from where it was
/// thrown: nothing is unwound, so nothing waits for streams or peers that may never come.
int run_program(const char* name, const char* summary, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train,
                const StageOptions& add_stage_options = {});

}  // namespace lockstep
