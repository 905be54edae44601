#include "common/data/byte_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/core/error.h"

namespace lockstep {
namespace {

constexpr uint64_t kMostBytesPerDeflatedByte = 1032;
constexpr size_t kInputBytes = size_t{256} * 1024;
constexpr size_t kMostOutput = size_t{1} << 30;  // zlib counts in 32 bits
constexpr std::array<uint8_t, 2> kGzipMagic{0x1f, 0x8b};

}  // namespace

struct ByteReader::Inflater {
  Inflater() {
    constexpr int kGzipFormat = 16;
    if (inflateInit2(&stream, kGzipFormat + MAX_WBITS) != Z_OK)
      fail<EnvironmentError>("zlib {}: no memory to inflate with", zlibVersion());
  }
  ~Inflater() { inflateEnd(&stream); }

  z_stream stream{};
  std::array<uint8_t, kInputBytes> input;
  bool ended = false;
};

ByteReader::ByteReader(std::filesystem::path path) : path_(std::move(path)) {
  if (path_.extension() == ".gz") inflater_ = std::make_unique<Inflater>();
  // Without O_NONBLOCK, opening a named pipe would wait for ever for a writer.
  file_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file_ < 0) fail<EnvironmentError>("cannot open {}: {}", path_.string(), errno_text(errno));

  struct stat status = {};
  const bool known = ::fstat(file_, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    ::close(file_);
    fail<BadInput>("{} is {}, expected a file", path_.string(),
                   known && S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
  }
  file_bytes_ = static_cast<uint64_t>(status.st_size);
  if (!compressed()) refuse_gzip();
}

/// None of the formats that are read here begins so.
void ByteReader::refuse_gzip() const {
  std::array<uint8_t, kGzipMagic.size()> first{};
  const bool packed =
      ::pread(file_, first.data(), first.size(), 0) == ssize_t(first.size()) && first == kGzipMagic;
  if (!packed) return;
  ::close(file_);
  fail<BadInput>(
      "{}: found gzip data, expected it under a name that ends in .gz; rename it to {}.gz",
      path_.string(), path_.filename().string());
}

ByteReader::~ByteReader() { ::close(file_); }

uint64_t ByteReader::most_bytes() const {
  return compressed() ? file_bytes_ * kMostBytesPerDeflatedByte : file_bytes_;
}

size_t ByteReader::read(std::span<uint8_t> out) {
  return compressed() ? read_gzip(out) : read_plain(out);
}

size_t ByteReader::read_plain(std::span<uint8_t> out) {
  size_t filled = 0;
  while (filled < out.size()) {
    const ssize_t got = ::read(file_, out.data() + filled, out.size() - filled);
    if (got == 0) break;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail<EnvironmentError>("cannot read {}: {}", path_.string(), errno_text(errno));
    filled += static_cast<size_t>(got);
  }
  return filled;
}

size_t ByteReader::read_gzip(std::span<uint8_t> out) {
  size_t filled = 0;
  while (filled < out.size() && !inflater_->ended) inflate_some(out, filled);
  return filled;
}

void ByteReader::inflate_some(std::span<uint8_t> out, size_t& filled) {
  z_stream& stream = inflater_->stream;
  if (stream.avail_in == 0) {
    fill_input();
    require(
        stream.avail_in > 0,
        "{}: the gzip data ends too early, after {} bytes: the file is truncated; fetch it again "
        "(./lockstep data NAME)",
        path_.string(), file_bytes_);
  }
  stream.next_out = out.data() + filled;
  stream.avail_out = static_cast<uInt>(std::min(out.size() - filled, kMostOutput));
  const int status = inflate(&stream, Z_NO_FLUSH);
  filled = static_cast<size_t>(stream.next_out - out.data());
  if (status == Z_STREAM_END) {
    begin_next_member();
  } else {
    // Z_BUF_ERROR only says that the input was used up without producing output.
    require(status == Z_OK || status == Z_BUF_ERROR,
            "{}: damaged gzip data ({}); fetch it again (./lockstep data NAME)", path_.string(),
            stream.msg != nullptr ? stream.msg : "no reason given");
  }
}

void ByteReader::fill_input() {
  inflater_->stream.next_in = inflater_->input.data();
  inflater_->stream.avail_in = static_cast<uInt>(read_plain(inflater_->input));
}

/// RFC 1952, 2.2: a file is one member or several, one after another. Zeros between them, and after
/// the last, are padding, which gzip ignores, too.
void ByteReader::begin_next_member() {
  z_stream& stream = inflater_->stream;
  const auto next_is_padding = [&] {
    if (stream.avail_in == 0) fill_input();
    return stream.avail_in > 0 && *stream.next_in == 0;
  };
  for (; next_is_padding(); --stream.avail_in) ++stream.next_in;
  inflater_->ended = stream.avail_in == 0;
  if (inflater_->ended) return;
  require(*stream.next_in == kGzipMagic[0],
          "{}: bytes that are no gzip data follow the end of it; get the file again, or let gunzip "
          "unpack it and gzip pack it anew",
          path_.string());
  inflateReset(&stream);
}

}  // namespace lockstep
