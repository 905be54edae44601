#pragma once
// Numbers and texts as bytes, the same on every host.

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "common/core/error.h"

namespace lockstep {

/// Appends the lowest `bytes` bytes of a number, lowest first.
inline void put_number(std::string& out, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

/// Appends the length of a text, then the text.
inline void put_text(std::string& out, std::string_view text) {
  put_number(out, text.size(), 4);
  out += text;
}

/// Takes numbers and texts out again, in the same order. Throws BadInput where the bytes end too
/// soon.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : left_(bytes) {}

  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    const std::string_view taken = take(bytes);
    for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(taken[i]);
    return value;
  }
  std::string text() { return std::string(take(number(4))); }
  bool at_end() const { return left_.empty(); }

 private:
  std::string_view take(size_t bytes) {
    require(bytes <= left_.size(), "a message ends {} bytes too soon", bytes - left_.size());
    const std::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }
  std::string_view left_;
};

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}
inline std::span<std::byte> writable_bytes_of(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

}  // namespace lockstep
