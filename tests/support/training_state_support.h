#pragma once
// Shared by the tests of training states and the fuzzer. Free of Catch2: the fuzzer has its own
// main.

#include <stdexcept>
#include <string>

#include "05-syncbn-checkpoint/training_state.h"
#include "common/core/error.h"

namespace lockstep::testing {

/// Checks from_json()'s promise for any text: it throws BadInput (returned here as its text), or it
/// accepts (returned as ""), and then the state survives its own text. Anything else is a
/// std::logic_error.
inline std::string check_training_state(const std::string& text) {
  try {
    const TrainingState state = TrainingState::from_json(text, "fuzzed");
    if (TrainingState::from_json(state.to_json(), "again") != state) {
      throw std::logic_error("a state differs after writing and reading it");
    }
    return "";
  } catch (const BadInput& error) {
    const std::string refusal = error.what();
    if (!refusal.starts_with("fuzzed: ") || refusal.find_first_of("\n\r") != refusal.npos ||
        refusal.size() > 600) {
      throw std::logic_error("not one line of text that names the file: " + refusal);
    }
    return refusal;
  }
}

}  // namespace lockstep::testing
