#pragma once
// Files of other formats, which users give where safetensors are expected. Not for use outside
// common/io.

#include <cstddef>
#include <span>
#include <string>

namespace lockstep::safetensors {

/// As many of a file's first bytes as refuse_foreign() looks at: where tar has its mark ends
/// before.
inline constexpr std::size_t kTellingBytes = 512;

/// Throws BadInput that says what the file `what` is, and how to make safetensors of it, if it
/// begins with `first` as a file of another format does.
void refuse_foreign(std::span<const std::byte> first, const std::string& what);

}  // namespace lockstep::safetensors
