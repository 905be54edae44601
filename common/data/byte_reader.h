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
  /// if the file cannot be opened, with the system's reason, and BadInput if it is not a regular
  /// file, or holds gzip data under another name.
  explicit ByteReader(std::filesystem::path path);
  ~ByteReader();
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  const std::filesystem::path& path() const { return path_; }
  bool compressed() const { return inflater_ != nullptr; }

  /// The most bytes that can come out: the file's size, or 1032 times that for gzip, since deflate
  /// makes at most 1032 bytes out of one. A header's promise is compared with it before memory is
  /// allocated.
  uint64_t most_bytes() const;

  /// Fills `out` and returns its size; returns less only at the end of the data. When it has
  /// returned less, gzip's checksum has been verified, too. Throws BadInput on a damaged or
  /// truncated gzip stream and on bytes after it that are neither padding nor a further one,
  /// EnvironmentError when the system cannot read.
  size_t read(std::span<uint8_t> out);

 private:
  struct Inflater;

  size_t read_plain(std::span<uint8_t> out);
  size_t read_gzip(std::span<uint8_t> out);
  void inflate_some(std::span<uint8_t> out, size_t& filled);
  void fill_input();
  void begin_next_member();
  void refuse_gzip() const;

  std::filesystem::path path_;
  int file_ = -1;
  uint64_t file_bytes_ = 0;
  std::unique_ptr<Inflater> inflater_;
};

}  // namespace lockstep
