#pragma once
// Small data files for the tests of common/data/, whole and damaged.

#include <zlib.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace lockstep::testing {

using Bytes = std::vector<uint8_t>;

inline void write_file(const std::filesystem::path& path, const Bytes& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

inline void append_big_endian(Bytes& bytes, uint32_t word) {
  for (const int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<uint8_t>(word >> shift));
}

/// An IDX file in memory: magic number, one word per dimension, payload.
inline Bytes idx_bytes(uint32_t magic, const std::vector<uint32_t>& sizes, const Bytes& payload) {
  Bytes bytes;
  append_big_endian(bytes, magic);
  for (const uint32_t size : sizes) append_big_endian(bytes, size);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

/// Payload that differs from byte to byte.
inline Bytes counting(size_t size, uint32_t modulus) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i % modulus);
  return bytes;
}

/// `count` images of 3x2 pixels.
inline Bytes idx_images(uint32_t count) {
  return idx_bytes(2051, {count, 3, 2}, counting(size_t{count} * 6, 251));
}

/// Labels 0, 1, ... 9, 0, ...
inline Bytes idx_labels(uint32_t count) { return idx_bytes(2049, {count}, counting(count, 10)); }

inline Bytes gzip(const Bytes& plain) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  Bytes out(deflateBound(&stream, plain.size()));
  stream.next_in = const_cast<uint8_t*>(plain.data());
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  if (deflate(&stream, Z_FINISH) != Z_STREAM_END) throw std::runtime_error("deflate failed");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// The message of the `E` that `action` throws; says so if it throws nothing. An error of another
/// kind is passed on: its text might contain what a test looks for, too.
template <class E, class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// An environment variable with another value (or none) while the object lives.
class ScopedEnvironment {
 public:
  ScopedEnvironment(std::string name, const std::optional<std::string>& value)
      : name_(std::move(name)) {
    if (const char* before = std::getenv(name_.c_str())) before_ = before;
    set(value);
  }
  ~ScopedEnvironment() { set(before_); }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  void set(const std::optional<std::string>& value) {
    if (value)
      ::setenv(name_.c_str(), value->c_str(), 1);
    else
      ::unsetenv(name_.c_str());
  }

  std::string name_;
  std::optional<std::string> before_;
};

}  // namespace lockstep::testing
