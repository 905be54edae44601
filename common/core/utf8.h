#pragma once
// UTF-8 as RFC 3629 defines it.

#include <cstddef>
#include <string_view>

namespace lockstep {

/// Length in bytes of the well-formed sequence at the start of `text` (not empty), 0 if there is
/// none.
std::size_t utf8_length(std::string_view text);

/// Index of the first byte that is not part of well-formed UTF-8, or `text.size()` if all is well.
/// Overlong forms, surrogates (U+D800 to U+DFFF) and code points above U+10FFFF are ill-formed.
std::size_t find_invalid_utf8(std::string_view text);

inline bool is_valid_utf8(std::string_view text) { return find_invalid_utf8(text) == text.size(); }

}  // namespace lockstep
