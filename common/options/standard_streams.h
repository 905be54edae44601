#pragma once
// A program's stdin, stdout and stderr.

namespace lockstep {

/// Call it before a program opens anything: the next file or connection would take the number of a
/// closed stdin, stdout or stderr, and would then get what is printed. What holds their places from
/// here on cannot be written to: that is an error as before.
void hold_standard_streams();
/// Call it at the program's end: throws EnvironmentError if not all that was printed got out.
void require_printed();

}  // namespace lockstep
