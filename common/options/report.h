#pragma once
// How a program begins and ends: its standard streams, and the error line of a program that fails.

#include <functional>

namespace lockstep {

/// Call it before a program opens anything. Otherwise the next file or connection would take the
/// number of a closed stdin, stdout or stderr, and would then get what is printed. From here on
/// /dev/null, open for reading only, takes these numbers: writing there is an error as before.
void hold_standard_streams();

/// Within a catch block, or where an exception ended the program: writes "error: " and the
/// exception's text to stderr, on one line. Returns the exit status that goes with it: an Error's
/// own, else 1.
int report_current_exception();

/// Runs `work`, which all ranks of a job do alike before they have met, such as reading the command
/// line. If our launcher started the ranks, the launcher reports an Error of `work`, once; this
/// function then throws SaidByAnother.
void said_once(const std::function<void()>& work);

/// From here on an exception that nobody catches is reported as by report_current_exception(), and
/// ends the process with that status. Nothing is unwound. Reaching a limit on file size (ulimit -f)
/// is an error of the write, too, and no longer a signal.
void report_uncaught_errors();

/// Call it at the program's end: throws EnvironmentError if not all that was printed got out.
void require_printed();

}  // namespace lockstep
