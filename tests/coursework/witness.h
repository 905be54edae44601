#pragma once
// What a graded program tells the grader (witness.cpp): which cases ran, what every assertion
// found, and the values of hidden cases.

#include <cstdint>
#include <string>

namespace lockstep::testing {

/// What the test looks for from here on. The grader shows it if the program crashes or never ends.
void tell_hint(const char* text);

/// A value that a task computed in a hidden case. The grader compares it with the solution's.
void tell_value(const std::string& label, const std::string& value);

/// The seed of this grading; 1 if no grader listens.
uint64_t hidden_seed();

}  // namespace lockstep::testing
