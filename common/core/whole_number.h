#pragma once
// Whole numbers in texts that come from outside.

#include <string>
#include <string_view>

namespace lockstep {

/// `text` as a whole number from `least` to `most`: all of it, no prefix. Throws BadInput:
/// "NAME=text: expected a whole number from 0 to 1", with `why` after it.
int parse_whole(std::string_view text, const std::string& name, int least, int most,
                const std::string& why = "");

}  // namespace lockstep
