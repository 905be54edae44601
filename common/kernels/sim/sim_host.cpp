#include "common/kernels/sim/sim_host.h"

#include <cstring>
#include <utility>
#include <vector>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/real.h"

namespace lockstep {
namespace {

constexpr size_t kSmall = 65536;
constexpr int64_t kLongestRun = 1'000'000'000'000'000'000;  // ns: 32 years

}  // namespace

int64_t SimHost::counted(int64_t ns) {
  require(ns <= kLongestRun,
          "simulated devices: the run takes more than {:g} s, which no clock counts here; look at "
          "the profile's seconds and rates, or give fewer steps",
          1e-9 * double(kLongestRun));
  return ns;
}

void* SimHost::allocate(size_t bytes, const Device& device) {
  void* memory = nullptr;
  if (bytes <= kSmall) {
    memory = allocate_aligned(bytes);
    std::memset(memory, 0, bytes);
  } else {
    memory = reinterpret_cast<void*>(next_place_);
    next_place_ += (bytes + 255) / 256 * 256;
  }
  blocks_[place_of(memory)] = {bytes, &device};
  return memory;
}

void SimHost::release(void* memory) {
  const auto block = blocks_.find(place_of(memory));
  forget(memory, block->second.bytes);
  blocks_.erase(block);
  if (is_memory(memory)) release_aligned(memory);
}

const Device* SimHost::device_at(const void* address) const {
  auto block = blocks_.upper_bound(place_of(address));  // the first one behind it
  if (block == blocks_.begin()) return nullptr;
  --block;
  const bool inside = place_of(address) < block->first + block->second.bytes;
  return inside ? block->second.device : nullptr;
}

void SimHost::copy(void* to, const void* from, size_t bytes) {
  if (device_at(to) != nullptr) copy_known(to, from, bytes);
  if (!is_memory(to)) return;
  if (is_memory(from)) {
    std::memcpy(to, from, bytes);
  } else {
    std::memset(to, 0, bytes);
  }
  if (device_at(to) == nullptr) tell_known(to, from, bytes);
}

/// Writes what is known into the host's memory.
void SimHost::tell_known(void* to, const void* from, size_t bytes) const {
  const uint64_t first = place_of(from);
  for (auto value = known_.lower_bound(first);
       value != known_.end() && value->first < first + bytes; ++value) {
    const Real number = Real(value->second);
    std::memcpy(static_cast<char*>(to) + (value->first - first), &number, sizeof number);
  }
}

const double* SimHost::known(const void* address) const {
  const auto found = known_.find(place_of(address));
  return found == known_.end() ? nullptr : &found->second;
}

void SimHost::copy_known(void* to, const void* from, size_t bytes, double factor) {
  const uint64_t first = place_of(from), target = place_of(to);
  std::vector<std::pair<uint64_t, double>> found;  // first all: the ranges may be one
  for (auto value = known_.lower_bound(first);
       value != known_.end() && value->first < first + bytes; ++value) {
    found.emplace_back(value->first - first, factor * value->second);
  }
  forget(to, bytes);
  for (const auto& [place, value] : found) known_[target + place] = value;
}

void SimHost::forget(const void* first, size_t bytes) {
  const uint64_t place = place_of(first);
  known_.erase(known_.lower_bound(place), known_.lower_bound(place + bytes));
}

}  // namespace lockstep
