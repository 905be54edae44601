#include "common/data/cifar.h"

#include "common/core/error.h"
#include "common/data/byte_reader.h"

namespace lockstep {
namespace {

constexpr int64_t kCifarSide = 32;
constexpr int64_t kCifarPixels = kCifarSide * kCifarSide;
constexpr int64_t kCifarChannels = 3;
constexpr size_t kImageBytes = kCifarPixels * kCifarChannels;
constexpr size_t kRecordBytes = 1 + kImageBytes;
constexpr size_t kRecordsAtOnce = 100;

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

void planes_to_channels_last(const uint8_t* planes, int64_t channels, int64_t pixels,
                             uint8_t* out) {
  for (int64_t pixel = 0; pixel < pixels; ++pixel)
    for (int64_t channel = 0; channel < channels; ++channel)
      out[pixel * channels + channel] = planes[channel * pixels + pixel];
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
