#pragma once
// The command line with which this process was started.

#include <string>
#include <vector>

namespace lockstep {

/// Word by word.
std::vector<std::string> own_command_line();
/// As typed into a shell: for people, and for errors that propose a command.
std::string typed_command_line();

}  // namespace lockstep
