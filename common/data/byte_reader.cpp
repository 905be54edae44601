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
    stream.next_in = inflater_->input.data();
    stream.avail_in = static_cast<uInt>(read_plain(inflater_->input));
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
    inflater_->ended = true;
    check_nothing_follows();
  } else {
    // Z_BUF_ERROR only says that the input was used up without producing output.
    require(status == Z_OK || status == Z_BUF_ERROR,
            "{}: damaged gzip data ({}); fetch it again (./lockstep data NAME)", path_.string(),
            stream.msg != nullptr ? stream.msg : "no reason given");
  }
}

void ByteReader::check_nothing_follows() {
  uint8_t next = 0;
  const bool more = inflater_->stream.avail_in > 0 || read_plain({&next, 1}) > 0;
  require(!more, "{}: bytes follow the end of the gzip data; fetch it again (./lockstep data NAME)",
          path_.string());
}

}  // namespace lockstep
