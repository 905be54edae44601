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

/// Divides a batch of 1 or more samples as torch.chunk does, and so as DataParallel scatters it.
/// Each part gets the next ceil(B/D) samples until none is left. So the last part may be smaller,
/// and there may be fewer parts than asked for. No part is empty.
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
  /// micro: the batch is dealt to so many ranks, and each rank cuts its samples. Micro-batch m has
  /// the samples of micro-batch m of all ranks.
  int64_t ranks = 1;

  std::vector<BatchPart> divide(int64_t batch_size) const;

  /// Reads "none", "chunk:D", "stride:W", "micro:M" or, for W ranks, "micro:MxW", with numbers from
  /// 1 to 1024. Throws BadInput for any other text.
  static BatchSplit from(std::string_view text);
  std::string text() const;
  friend bool operator==(const BatchSplit&, const BatchSplit&) = default;
};

}  // namespace lockstep
