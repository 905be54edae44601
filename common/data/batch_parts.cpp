#include "common/data/batch_parts.h"

#include <algorithm>
#include <array>

#include "common/core/error.h"
#include "common/core/parse.h"

namespace lockstep {
namespace {

constexpr std::array kWords{"none", "chunk", "stride", "micro"};  // in the order of the kinds

std::vector<BatchPart> deal(int64_t batch_size, int64_t parts) {
  std::vector<BatchPart> hands;
  for (int64_t rank = 0; rank < std::min(parts, batch_size); ++rank) {
    hands.push_back({rank, parts, (batch_size - rank + parts - 1) / parts});
  }
  return hands;
}

/// Of `count` samples, how many part `number` has; the first `count` mod `parts` have one more.
int64_t share_of(int64_t count, int64_t parts, int64_t number) {
  return count / parts + (number < count % parts ? 1 : 0);
}

/// The samples of ranks' micro-batches follow each other: a rank that cuts one sample later than
/// another one is in front of it.
std::vector<BatchPart> micro(const BatchSplit& split, int64_t batch_size) {
  std::vector<BatchPart> micro_batches;
  for (int64_t m = 0, first = 0; m < split.parts; ++m) {
    int64_t count = 0;
    for (int64_t rank = 0; rank < split.ranks; ++rank) {
      count += share_of(share_of(batch_size, split.ranks, rank), split.parts, m);
    }
    if (count > 0 || split.keep_empty) micro_batches.push_back({first, 1, count});
    first += count;
  }
  return micro_batches;
}

}  // namespace

std::vector<BatchPart> chunk_parts(int64_t batch_size, int64_t parts) {
  // [task 02.1] chunk rule
  const int64_t size = (batch_size + parts - 1) / parts;
  std::vector<BatchPart> chunks;
  for (int64_t first = 0; first < batch_size; first += size) {
    chunks.push_back({first, 1, std::min(size, batch_size - first)});
  }
  return chunks;
  // [end 02.1]
}

std::vector<BatchPart> BatchSplit::divide(int64_t batch_size) const {
  if (batch_size == 0 && !keep_empty) return {{}};
  switch (kind) {
    case Kind::chunk:
      return chunk_parts(batch_size, parts);
    case Kind::stride:
      return deal(batch_size, parts);
    case Kind::micro:
      return micro(*this, batch_size);
    case Kind::whole:
      break;
  }
  return {{0, 1, batch_size}};
}

BatchSplit BatchSplit::from(std::string_view text) {
  if (text == kWords[0]) return {};
  const size_t colon = std::min(text.find(':'), text.size());
  const auto word = std::find(kWords.begin() + 1, kWords.end(), text.substr(0, colon));
  const auto kind = static_cast<Kind>(word - kWords.begin());
  const std::string_view numbers = text.substr(std::min(colon + 1, text.size()));
  const size_t x =
      kind == Kind::micro ? std::min(numbers.find('x'), numbers.size()) : numbers.size();
  const auto parts = read_whole(numbers.substr(0, x), 1, 1024);
  const auto ranks = read_whole(x < numbers.size() ? numbers.substr(x + 1) : "1", 1, 1024);
  require(word != kWords.end() && parts && ranks,
          "--emulate: found '{}', expected none, chunk:D, stride:W, micro:M or micro:MxW with "
          "numbers from 1 to 1024",
          text);
  return {.kind = kind, .parts = *parts, .ranks = *ranks};
}

std::string BatchSplit::text() const {
  const char* word = kWords.at(size_t(kind));
  if (kind == Kind::whole) return word;
  return fmt::format("{}:{}{}", word, parts, ranks > 1 ? fmt::format("x{}", ranks) : "");
}

}  // namespace lockstep
