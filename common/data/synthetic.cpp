#include "common/data/synthetic.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "common/core/error.h"
#include "common/core/parse.h"

namespace lockstep {
namespace {

constexpr int64_t kSide = 28;
constexpr int64_t kMostShift = 2;
constexpr int64_t kShifts = 2 * kMostShift + 1;
constexpr int64_t kCanvas = kSide + 2 * kMostShift;
constexpr int64_t kCell = 4;                     // pixels between two knots of a pattern
constexpr int64_t kKnots = kCanvas / kCell + 1;  // per side
constexpr int64_t kMostSamples = 1000000;

// What the bits of a draw are for; part of the counter, so that no two uses share them.
enum class Draw : uint64_t { pattern = 1, train = 2, test = 3 };

uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64 (Steele, Lea, Flood 2014)
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A counter-based generator: 64 random bits for each (stream, item, position), in any order.
uint64_t draw(uint64_t key, int64_t position) { return mix(key ^ static_cast<uint64_t>(position)); }

uint64_t key_of(Draw stream, int64_t item) {
  return mix(mix(mix(0) ^ static_cast<uint64_t>(stream)) ^ static_cast<uint64_t>(item));
}

using Canvas = std::array<int32_t, kCanvas * kCanvas>;

// Random knots, interpolated bilinearly and squared, so that most of an image is dark as in MNIST:
// 0..255, [kCanvas, kCanvas].
Canvas make_pattern(int64_t label) {
  const uint64_t key = key_of(Draw::pattern, label);
  const auto knot = [&](int64_t y, int64_t x) {
    return static_cast<int32_t>(draw(key, y * kKnots + x) & 255);
  };
  constexpr auto kWeights = static_cast<int32_t>(kCell * kCell);
  Canvas canvas;
  for (int64_t y = 0; y < kCanvas; ++y)
    for (int64_t x = 0; x < kCanvas; ++x) {
      const int64_t row = y / kCell, column = x / kCell;
      const auto down = static_cast<int32_t>(y % kCell), right = static_cast<int32_t>(x % kCell);
      const auto up = static_cast<int32_t>(kCell) - down,
                 left = static_cast<int32_t>(kCell) - right;
      const int32_t above = left * knot(row, column) + right * knot(row, column + 1);
      const int32_t below = left * knot(row + 1, column) + right * knot(row + 1, column + 1);
      const int32_t value = (up * above + down * below) / kWeights;
      canvas[static_cast<size_t>(y * kCanvas + x)] = value * value / 255;
    }
  return canvas;
}

// Sum of four bytes, centred: nearly a normal distribution of standard deviation 148 / 4.
int32_t noise(uint32_t bits) {
  const auto sum =
      static_cast<int32_t>((bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24));
  return (sum - 510) / 4;
}

void draw_sample(const Canvas& pattern, uint64_t key, uint8_t* image) {
  const uint64_t shift = draw(key, -1);
  const auto top = static_cast<int64_t>(shift % kShifts);
  const auto left = static_cast<int64_t>((shift >> 32) % kShifts);
  for (int64_t y = 0; y < kSide; ++y)
    for (int64_t x = 0; x < kSide; ++x) {
      const int64_t pixel = y * kSide + x;
      const uint64_t bits = draw(key, pixel / 2);
      const auto half = static_cast<uint32_t>(pixel % 2 == 0 ? bits : bits >> 32);
      const int32_t value =
          pattern[static_cast<size_t>((y + top) * kCanvas + x + left)] + noise(half);
      image[pixel] = static_cast<uint8_t>(std::clamp(value, 0, 255));
    }
}

int64_t parse_count(std::string_view text, const char* what, const std::string& name) {
  const auto count = read_whole(text, 1, kMostSamples);
  require(count.has_value(), "--data {}: number of {} images: found '{}', expected 1 to {}", name,
          what, text, kMostSamples);
  return *count;
}

}  // namespace

SyntheticSizes parse_synthetic(const std::string& name) {
  const std::string_view text = name;
  if (text == "synthetic") return {};
  const size_t first = text.find(':');
  const size_t second = text.find(':', first + 1);
  const std::string_view kind = text.substr(0, first);
  require((kind == "synthetic" || kind == "blank") && first != text.npos && second != text.npos,
          "--data: found '{}', expected synthetic or synthetic:TRAIN:TEST, for instance "
          "synthetic:256:64",
          name);
  return {parse_count(text.substr(first + 1, second - first - 1), "training", name),
          parse_count(text.substr(second + 1), "test", name)};
}

Dataset make_blank(int64_t count) {
  Dataset set;
  set.height = kSide;
  set.width = kSide;
  set.channels = 1;
  set.classes = kClasses;
  for (int64_t i = 0; i < count; ++i) set.labels.push_back(static_cast<uint8_t>(i % kClasses));
  return set;
}

Dataset make_synthetic(SyntheticPart part, int64_t count) {
  require(count >= 0 && count <= kMostSamples, "synthetic data: {} images, expected 0 to {}", count,
          kMostSamples);
  std::vector<Canvas> patterns;
  for (int64_t label = 0; label < kClasses; ++label) patterns.push_back(make_pattern(label));

  Dataset set = make_blank(count);
  set.images.resize(static_cast<size_t>(count * kSide * kSide));
  const Draw stream = part == SyntheticPart::train ? Draw::train : Draw::test;
  for (int64_t i = 0; i < count; ++i) {
    const auto label = static_cast<size_t>(i % kClasses);
    draw_sample(patterns[label], key_of(stream, i), &set.images[i * kSide * kSide]);
  }
  return set;
}

}  // namespace lockstep
