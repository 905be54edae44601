#pragma once
// Shared by the tests of common/io and the fuzzer. Free of Catch2: the fuzzer has its own main.

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/core/error.h"
#include "common/core/utf8.h"
#include "common/io/safetensors.h"

namespace lockstep::testing::io {

inline std::vector<std::byte> to_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

inline std::string to_string(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// A file: the length of `header`, `header`, `payload`; none of them checked.
inline std::string file_of(const std::string& header, const std::string& payload = "") {
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + payload;
}

inline bool same_tensor(const TensorEntry& a, const TensorEntry& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape &&
         std::ranges::equal(a.bytes, b.bytes);
}

/// The promise of the parser for any bytes at all: it throws BadInput (returned here as its text),
/// or it accepts (returned as ""). What it accepts must survive being written and read again, and
/// the second writing must give the same bytes; written with checksums, it is accepted, too.
/// Anything else is a std::logic_error.
inline std::string check_parser(std::string_view file) {
  std::string refusal;
  try {
    const SafetensorsFile first = parse_safetensors(to_bytes(file), "fuzzed");
    const auto write = [&](const SafetensorsFile& read) {
      return serialize_safetensors(read.tensors(), read.metadata(), first.checksums());
    };
    const auto written = write(first);
    const SafetensorsFile second = parse_safetensors(written, "rewritten");
    if (write(second) != written || second.checksums() != first.checksums()) {
      throw std::logic_error("the second writing differs from the first");
    }
    parse_safetensors(serialize_safetensors(first.tensors(), first.metadata(), Checksums::crc32),
                      "sealed");
    const auto survives = [&](const TensorEntry& tensor) {
      const TensorEntry* again = second.find(tensor.name);
      return again != nullptr && same_tensor(*again, tensor);
    };
    if (first.tensors().size() != second.tensors().size() ||
        first.metadata() != second.metadata() || !std::ranges::all_of(first.tensors(), survives)) {
      throw std::logic_error("what was read differs after writing and reading it again");
    }
  } catch (const BadInput& error) {
    refusal = error.what();
    const bool one_line = refusal.find_first_of("\n\r") == refusal.npos && refusal.size() < 600;
    if (!refusal.starts_with("fuzzed: ") || !one_line || !is_valid_utf8(refusal)) {
      throw std::logic_error("not one line of text that names the file: " + refusal);
    }
  }
  return refusal;
}

/// A fresh directory, removed with everything in it.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep-io-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + name);
    path_ = name;
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  /// Names of all files in it, hidden ones too, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& item : std::filesystem::directory_iterator(path_)) {
      names.push_back(item.path().filename().string());
    }
    std::ranges::sort(names);
    return names;
  }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace lockstep::testing::io
