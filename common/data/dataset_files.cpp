#include "common/data/dataset_files.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <memory>
#include <span>

#include "common/core/error.h"

namespace lockstep {

// --- Where files are -----------------------------------------------------------------------------

namespace {

namespace fs = std::filesystem;

// Whether something is there, readable or not: opening it then gives the precise error.
bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::status(path, error).type() != fs::file_type::not_found;
}

fs::path with_gz(const fs::path& path) { return path.string() + ".gz"; }

// The sub-folder comes first: MNIST and Fashion-MNIST use the same file names.
void add_folder(const fs::path& dir, const std::string& name, std::vector<fs::path>& places) {
  places.push_back(dir / name);
  places.push_back(dir);
}

std::vector<fs::path> places_to_look(const std::string& name, const std::string& dir) {
  std::vector<fs::path> places;
  if (!dir.empty()) {
    add_folder(dir, name, places);
    return places;
  }
  const char* environment = std::getenv("LOCKSTEP_DATA");
  if (environment != nullptr && *environment != '\0') add_folder(environment, name, places);
  places.push_back(fs::path("data") / name);
  if (name == "fashion-mnist") places.push_back("/usr/share/datasets/fashion-mnist");
  return places;
}

std::string how_to_get(const std::string& name) {
  return fmt::format(
      "fetch the data set with './lockstep data {}' or train on generated images with "
      "'--data synthetic'",
      name);
}

}  // namespace

fs::path find_dataset_dir(const std::string& name, const std::string& dir,
                          const std::vector<std::string>& files) {
  std::string looked_at;
  for (const fs::path& place : places_to_look(name, dir)) {
    const bool found = std::any_of(files.begin(), files.end(), [&](const std::string& file) {
      return is_there(place / file) || is_there(with_gz(place / file));
    });
    if (found) return place;
    looked_at += (looked_at.empty() ? "" : ", ") + place.string();
  }
  fail<EnvironmentError>("{}: no file '{}' or '{}.gz' in {}; {}", name, files.front(),
                         files.front(), looked_at, how_to_get(name));
}

fs::path find_dataset_file(const std::string& name, const fs::path& dir, const std::string& file) {
  const fs::path path = dir / file;
  if (is_there(path)) return path;
  if (is_there(with_gz(path))) return with_gz(path);
  fail<EnvironmentError>("{}: {} is missing (and so is {}.gz); {}", name, path.string(), file,
                         how_to_get(name));
}

namespace {

// --- A file, plain or gzip -----------------------------------------------------------------------

constexpr uint64_t kMostBytesPerDeflatedByte = 1032;
constexpr size_t kInputBytes = size_t{256} * 1024;
constexpr size_t kMostOutput = size_t{1} << 30;  // zlib counts in 32 bits
constexpr std::array<uint8_t, 2> kGzipMagic{0x1f, 0x8b};

/// A file, plain or gzip, read once from front to back straight into the caller's memory.
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

// --- IDX -----------------------------------------------------------------------------------------

constexpr uint32_t kImageMagic = 2051;
constexpr uint32_t kLabelMagic = 2049;

uint32_t big_endian_32(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

// Product of the dimensions; a header can promise up to 2^96 bytes, which is held at the maximum
// here.
uint64_t saturating_product(const std::vector<uint32_t>& sizes) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  uint64_t product = 1;
  for (const uint32_t size : sizes)
    product = size != 0 && product > kMost / size ? kMost : product * size;
  return product;
}

struct IdxData {
  std::vector<uint32_t> sizes;
  std::vector<uint8_t> bytes;
};

std::vector<uint32_t> read_header(ByteReader& file, uint32_t expected_magic, size_t dimensions) {
  std::array<uint8_t, 16> header;
  const size_t bytes = 4 * (1 + dimensions);
  const size_t got = file.read(std::span(header).first(bytes));
  require(got == bytes,
          "{}: {} bytes, too short for the IDX header of {} bytes; fetch it again "
          "(./lockstep data NAME)",
          file.path().string(), got, bytes);
  const uint32_t magic = big_endian_32(header.data());
  require(magic == expected_magic, "{}: magic number {}, expected {} ({})", file.path().string(),
          magic, expected_magic, expected_magic == kImageMagic ? "IDX images" : "IDX labels");
  std::vector<uint32_t> sizes;
  for (size_t i = 1; i <= dimensions; ++i) sizes.push_back(big_endian_32(header.data() + 4 * i));
  return sizes;
}

// Before anything is allocated: can the file hold what its header promises?
void check_size(const ByteReader& file, const std::vector<uint32_t>& sizes) {
  const uint64_t header = 4 * (1 + sizes.size());
  const uint64_t payload = saturating_product(sizes);
  const uint64_t most = file.most_bytes();
  const bool possible = file.compressed() ? payload <= most : payload == most - header;
  require(possible,
          "{}: {} {} bytes, but its header promises {} bytes ({}): the file is {}; fetch it again "
          "(./lockstep data NAME)",
          file.path().string(), file.compressed() ? "can hold at most" : "holds", most,
          payload > std::numeric_limits<uint64_t>::max() - header ? payload : header + payload,
          fmt::join(sizes, " x "), payload > most - header ? "truncated" : "too long");
}

IdxData read_idx(const std::filesystem::path& path, uint32_t magic, size_t dimensions) {
  ByteReader file(path);
  IdxData data{read_header(file, magic, dimensions), {}};
  check_size(file, data.sizes);

  data.bytes.resize(saturating_product(data.sizes));
  const size_t got = file.read(data.bytes);
  require(got == data.bytes.size(),
          "{}: {} bytes follow the header, which promises {} ({}): the file is truncated; fetch it "
          "again (./lockstep data NAME)",
          path.string(), got, data.bytes.size(), fmt::join(data.sizes, " x "));
  uint8_t next = 0;
  require(file.read({&next, 1}) == 0,
          "{}: more bytes follow the header than the {} it promises ({}): the file is too long; "
          "fetch it again (./lockstep data NAME)",
          path.string(), data.bytes.size(), fmt::join(data.sizes, " x "));
  return data;
}

// --- CIFAR-10 ------------------------------------------------------------------------------------

constexpr int64_t kCifarSide = 32;
constexpr int64_t kCifarPixels = kCifarSide * kCifarSide;
constexpr int64_t kCifarChannels = 3;
constexpr size_t kImageBytes = kCifarPixels * kCifarChannels;
constexpr size_t kRecordBytes = 1 + kImageBytes;
constexpr size_t kRecordsAtOnce = 100;

/// One image from planes [channels, pixels] to channels last [pixels, channels].
void planes_to_channels_last(const uint8_t* planes, int64_t channels, int64_t pixels,
                             uint8_t* out) {
  for (int64_t pixel = 0; pixel < pixels; ++pixel)
    for (int64_t channel = 0; channel < channels; ++channel)
      out[pixel * channels + channel] = planes[channel * pixels + pixel];
}

void append_record(const uint8_t* record, Dataset& set) {
  set.labels.push_back(record[0]);
  set.images.resize(set.images.size() + kImageBytes);
  planes_to_channels_last(record + 1, kCifarChannels, kCifarPixels,
                          set.images.data() + set.images.size() - kImageBytes);
}

void append_file(const std::filesystem::path& path, Dataset& set) {
  ByteReader file(path);
  const size_t before = set.labels.size();
  std::vector<uint8_t> block(kRecordsAtOnce * kRecordBytes);
  size_t total = 0;
  while (const size_t got = file.read(block)) {
    total += got;
    for (size_t at = 0; at + kRecordBytes <= got; at += kRecordBytes)
      append_record(block.data() + at, set);
  }
  require(
      total > 0 && total % kRecordBytes == 0,
      "{}: {} bytes, expected whole records of {} bytes (last one has {}): the file is truncated "
      "or no CIFAR-10 batch; fetch it again (./lockstep data cifar10)",
      path.string(), total, kRecordBytes, total % kRecordBytes);
  check_labels(std::span(set.labels).subspan(before), kClasses, path.string());
}

// Exact for plain files, so that the images never move while they grow.
size_t records_to_expect(const std::vector<std::filesystem::path>& files) {
  uint64_t records = 0;
  for (const auto& path : files) {
    const ByteReader file(path);
    if (!file.compressed()) records += file.most_bytes() / kRecordBytes;
  }
  return records;
}

}  // namespace

IdxImages read_idx_images(const std::filesystem::path& path) {
  IdxData data = read_idx(path, kImageMagic, 3);
  require(data.sizes[1] > 0 && data.sizes[2] > 0,
          "{}: images of {} x {} pixels, expected at least 1 x 1", path.string(), data.sizes[1],
          data.sizes[2]);
  return {data.sizes[0], data.sizes[1], data.sizes[2], std::move(data.bytes)};
}

std::vector<uint8_t> read_idx_labels(const std::filesystem::path& path, int64_t classes) {
  IdxData data = read_idx(path, kLabelMagic, 1);
  check_labels(data.bytes, classes, path.string());
  return std::move(data.bytes);
}

Dataset read_idx_dataset(const std::filesystem::path& images, const std::filesystem::path& labels,
                         int64_t classes) {
  Dataset set;
  set.labels = read_idx_labels(labels, classes);
  IdxImages read = read_idx_images(images);
  require(read.count == set.count(), "{} has {} images, but {} has {} labels: expected as many",
          images.string(), read.count, labels.string(), set.count());
  set.height = read.height;
  set.width = read.width;
  set.channels = 1;
  set.classes = classes;
  set.images = std::move(read.pixels);
  return set;
}

Dataset read_cifar10(const std::vector<std::filesystem::path>& files) {
  Dataset set;
  set.height = kCifarSide;
  set.width = kCifarSide;
  set.channels = kCifarChannels;
  set.classes = kClasses;
  const size_t records = records_to_expect(files);
  set.labels.reserve(records);
  set.images.reserve(records * kImageBytes);
  for (const auto& path : files) append_file(path, set);
  return set;
}

}  // namespace lockstep
