#include "common/nn/clip_by_norm.h"

#include <utility>

namespace lockstep {

ClipByNorm::ClipByNorm(const FlatParameters& parameters, double most)
    : ClipByNorm(parameters.stream(), {{parameters.values(), parameters.gradients()}}, most) {}

ClipByNorm::ClipByNorm(Stream stream, std::vector<UpdatedRange> ranges, double most,
                       AddOthers add_others)
    : stream_(stream),
      ranges_(most == 0 ? std::vector<UpdatedRange>() : std::move(ranges)),
      most_(Real(most)),
      add_others_(std::move(add_others)) {
  for (const UpdatedRange& range : ranges_) {
    const int64_t count = range.gradients.elements();
    const int64_t parts = (count + Kernels::kSumPart - 1) / Kernels::kSumPart;
    sums_.push_back(Tensor::empty(stream_, {1 + parts}));
  }
}

void ClipByNorm::operator()() const {
  if (ranges_.empty()) return;
  Kernels& kernels = stream_.kernels();
  const Tensor squares = sums_.front().range(0, {1});
  for (size_t i = 0; i < ranges_.size(); ++i) {
    kernels.sum_squares(stream_, ranges_[i].gradients, sums_[i]);
    if (i > 0) kernels.add(stream_, sums_[i].range(0, {1}), squares);
  }
  if (add_others_) add_others_(squares);
  for (const UpdatedRange& range : ranges_) {
    kernels.clip_to_norm(stream_, most_, squares, range.gradients);
  }
}

}  // namespace lockstep
