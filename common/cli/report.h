#pragma once
// The last word of a program that failed.

#include <functional>

namespace lockstep {

/// Within a catch block, or where an exception ended the program: writes "error: " and the
/// exception's text to stderr, on one line. The exit status that goes with it: an Error's own, else
/// 1.
int report_current_exception();

/// Does what all ranks of a job do alike before they have met, such as reading the command line:
/// where our launcher started them, it says their error, once. Throws SaidByAnother then.
void said_once(const std::function<void()>& work);

/// From here on an exception that nobody catches is reported so and ends the process with that
/// status. Nothing is unwound. A limit on the size of files (ulimit -f) is an error of the write,
/// too, instead of a signal.
void report_uncaught_errors();

}  // namespace lockstep
