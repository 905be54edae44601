#pragma once
// A program's stdin, stdout and stderr.

namespace lockstep {

/// To be called before a program opens anything: a closed stdin, stdout or stderr would be taken
/// for the next file or connection that is opened, which would then get what is printed. What holds
/// their places from here on cannot be written to: that is an error as before.
void hold_standard_streams();
/// To be called at its end: throws EnvironmentError if what was printed did not all get out.
void require_printed();

}  // namespace lockstep
