#pragma once
// A file, plain or gzip, read once from front to back straight into the caller's memory.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace lockstep {

class ByteReader {
 public:
  /// Opens `path`; a name that ends in ".gz" is inflated while it is read. Throws EnvironmentError
  /// if the file cannot be opened, with the system's reason, and BadInput if it is no regular file.
  explicit ByteReader(std::filesystem::path path);
  ~ByteReader();
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  const std::filesystem::path& path() const { return path_; }
  bool compressed() const { return inflater_ != nullptr; }

  /// Most bytes that can come out: the file's size, or, as deflate makes at most 1032 bytes out of
  /// one, 1032 times that. What a header promises is compared with it before memory is allocated.
  uint64_t most_bytes() const;

  /// Fills `out` and returns its size; returns less only at the end of the data. Whoever has seen a
  /// return of less has also had gzip's checksum verified. Throws BadInput on a damaged or
  /// truncated gzip stream and on bytes behind it, EnvironmentError when the system cannot read.
  size_t read(std::span<uint8_t> out);

 private:
  struct Inflater;

  size_t read_plain(std::span<uint8_t> out);
  size_t read_gzip(std::span<uint8_t> out);
  void inflate_some(std::span<uint8_t> out, size_t& filled);
  void check_nothing_follows();

  std::filesystem::path path_;
  int file_ = -1;
  uint64_t file_bytes_ = 0;
  std::unique_ptr<Inflater> inflater_;
};

}  // namespace lockstep
