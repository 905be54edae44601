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

std::vector<BatchPart> micro(int64_t batch_size, int64_t parts, bool keep_empty) {
  std::vector<BatchPart> micro_batches;
  for (int64_t m = 0, first = 0; m < (keep_empty ? parts : std::min(parts, batch_size)); ++m) {
    const int64_t count = batch_size / parts + (m < batch_size % parts ? 1 : 0);
    micro_batches.push_back({first, 1, count});
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
      return micro(batch_size, parts, keep_empty);
    case Kind::whole:
      break;
  }
  return {{0, 1, batch_size}};
}

BatchSplit BatchSplit::from(std::string_view text) {
  if (text == kWords[0]) return {};
  const size_t colon = std::min(text.find(':'), text.size());
  const auto word = std::find(kWords.begin() + 1, kWords.end(), text.substr(0, colon));
  const auto parts = read_whole(text.substr(std::min(colon + 1, text.size())), 1, 1024);
  require(word != kWords.end() && parts.has_value(),
          "--emulate: found '{}', expected none, chunk:D, stride:W or micro:M with a number from 1 "
          "to 1024",
          text);
  return {.kind = static_cast<Kind>(word - kWords.begin()), .parts = *parts};
}

std::string BatchSplit::text() const {
  const char* word = kWords.at(size_t(kind));
  return kind == Kind::whole ? word : fmt::format("{}:{}", word, parts);
}

}  // namespace lockstep
