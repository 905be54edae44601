#include "common/data/idx.h"

#include <fmt/ranges.h>

#include <array>
#include <limits>

#include "common/core/error.h"
#include "common/data/byte_reader.h"

namespace lockstep {
namespace {

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

}  // namespace lockstep
