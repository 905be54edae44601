#pragma once
// The last word of a program that failed.

namespace lockstep {

/// Within a catch block, or where an exception ended the program: writes "error: " and the
/// exception's text to stderr, on one line. The exit status that goes with it: an Error's own, else
/// 1.
int report_current_exception();

/// From here on an exception that nobody catches is reported so and ends the process with that
/// status. Nothing is unwound.
void report_uncaught_errors();

}  // namespace lockstep
