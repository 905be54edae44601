#include "common/core/whole_number.h"

#include <charconv>

#include "common/core/error.h"

namespace lockstep {

int parse_whole(std::string_view text, const std::string& name, int least, int most,
                const std::string& why) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  require(error == std::errc{} && stop == end && least <= value && value <= most,
          "{}={}: expected a whole number from {} to {}{}", name, text, least, most, why);
  return value;
}

}  // namespace lockstep
