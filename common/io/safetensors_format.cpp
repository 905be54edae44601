#include "common/io/safetensors_format.h"

#include "common/core/utf8.h"
#include "common/io/json.h"

namespace lockstep::safetensors {

std::string clipped(std::string_view text, std::size_t limit) {
  std::string shown(text.substr(0, limit));
  // A cut may leave half a character, and a parser may quote one.
  for (auto bad = find_invalid_utf8(shown); bad < shown.size(); bad = find_invalid_utf8(shown)) {
    shown[bad] = '?';
  }
  return text.size() > limit ? shown + "..." : shown;
}

std::string in_quotes(std::string_view text) { return nlohmann::json(clipped(text)).dump(); }

std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> shape, DType dtype) {
  std::uint64_t product = 1;
  for (const std::int64_t dimension : shape) {
    if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(dimension), &product)) return {};
  }
  if (__builtin_mul_overflow(product, std::uint64_t{dtype_size(dtype)}, &product)) return {};
  return product;
}

}  // namespace lockstep::safetensors
