#pragma once
// The frame of every main(): parse, run, and one place where errors become a line and a status.

#include <concepts>
#include <functional>

#include "common/options/options.h"

namespace lockstep {

/// Runs a stage's program: reads the command line into `options`, which `describe` adds to a
/// parser, and trains. Returns the exit status of main: 0; an Error's own status, after its text on
/// one line of stderr; 1 for any other exception. An exception that leaves `train` ends the process
/// at once, at the point where it was thrown: nothing is unwound, so nothing waits for streams or
/// peers that may never come. With --baseline `train` runs in child processes only (verdict.h).
int run_program(const StageInfo& stage, Options& options, const AddOptions& describe, int argc,
                const char* const* argv, const std::function<void()>& train);

/// The same for the options that a stage has: the common ones, and groups of its own.
template <std::derived_from<Options> StageOptions>
int run_program(const StageInfo& stage, StageOptions& options, int argc, const char* const* argv,
                const std::function<void()>& train) {
  const auto describe = [&](OptionParser& parser) { options.add_to(parser); };
  return run_program(stage, options, describe, argc, argv, train);
}

/// The same for a stage that has the common options only.
int run_program(const StageInfo& stage, int argc, const char* const* argv,
                const std::function<void(const Options&)>& train);

}  // namespace lockstep
