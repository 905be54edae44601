#pragma once
// Generated images, for use without files: tests, fault campaigns, a first try. Integer arithmetic
// only, so that every machine and compiler makes the same bytes.

#include <cstdint>
#include <string>

#include "common/data/dataset.h"

namespace lockstep {

struct SyntheticSizes {
  int64_t train = 6000;
  int64_t test = 1000;
};

/// Reads "synthetic" (6000 training and 1000 test images), "synthetic:TRAIN:TEST" or
/// "blank:TRAIN:TEST", each 1 to 1000000; throws BadInput with the value and the range.
SyntheticSizes parse_synthetic(const std::string& name);

/// `count` black images [28, 28, 1] of 10 classes, which take no memory: for devices that compute
/// nothing.
Dataset make_blank(int64_t count);

/// Both parts have the same classes; their samples differ.
enum class SyntheticPart { train, test };

/// `count` images [28, 28, 1] of 10 classes, sample i of class i % 10. Each is a smooth pattern
/// that belongs to the class, moved by up to 2 pixels each way, plus noise. Sample i depends only
/// on (part, i): a longer set begins with the shorter one. The seed network gets more than 90 % of
/// the test images right after one epoch of 6000.
Dataset make_synthetic(SyntheticPart part, int64_t count);

}  // namespace lockstep
