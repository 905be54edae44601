#pragma once
// Which samples of a batch belong together: how replicas, ranks and micro-batches divide it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Samples first, first + stride, ... (`count` of them) of a batch.
struct BatchPart {
  int64_t first = 0;
  int64_t stride = 1;
  int64_t count = 0;
  friend bool operator==(const BatchPart&, const BatchPart&) = default;
};

/// As torch.chunk divides a batch of 1 or more samples, and so DataParallel scatters it: ceil(B/D)
/// consecutive samples each until none is left, in order. So the last part may be smaller, and
/// there may be fewer parts than asked for; none is empty.
std::vector<BatchPart> chunk_parts(int64_t batch_size, int64_t parts);

/// How a batch is divided. Empty parts are left out, but an empty batch is one part.
struct BatchSplit {
  enum class Kind {
    whole,   // one part
    chunk,   // chunk_parts()
    stride,  // as DistributedSampler deals: part r gets samples r, r+W, r+2W, ...
    micro,   // as pipelines cut: m parts, the first B mod m one sample larger
  };
  Kind kind = Kind::whole;
  int64_t parts = 1;
  /// micro: keep empty parts, too, so that ranks with smaller batches make as many passes as the
  /// others.
  bool keep_empty = false;
  /// micro: that many ranks, to which the batch is dealt, cut their samples. Micro-batch m has
  /// those of all ranks' micro-batch m.
  int64_t ranks = 1;

  std::vector<BatchPart> divide(int64_t batch_size) const;

  /// "none", "chunk:D", "stride:W", "micro:M" or, of W ranks, "micro:MxW", with numbers from 1 to
  /// 1024; else throws BadInput.
  static BatchSplit from(std::string_view text);
  std::string text() const;
  friend bool operator==(const BatchSplit&, const BatchSplit&) = default;
};

}  // namespace lockstep
