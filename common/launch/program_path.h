#pragma once
// A program's file, found as a shell finds it.

#include <string>

namespace lockstep {

/// The path of a program: `name` itself if it contains a slash, else the first executable file of
/// that name in the folders of PATH (an empty one is the current folder). Throws EnvironmentError
/// if there is none, or none that may be executed.
std::string find_program(const std::string& name);

}  // namespace lockstep
