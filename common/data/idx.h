#pragma once
// The IDX format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist): big-endian 32-bit
// words, first the magic number, then one word per dimension, then the bytes.
//
// Strict: a file is used only if its size is exactly what its header promises.

#include <cstdint>
#include <filesystem>
#include <vector>

#include "common/data/dataset.h"

namespace lockstep {

/// Images of an IDX file of magic number 2051.
struct IdxImages {
  int64_t count = 0;
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> pixels;  ///< [count, height, width]
};

/// Reads an image file, plain or ".gz". Throws BadInput, naming the file, on a wrong magic number,
/// a size other than the one the header promises (checked before memory is allocated where the file
/// is plain) and damaged gzip data; EnvironmentError if the file cannot be opened.
IdxImages read_idx_images(const std::filesystem::path& path);

/// Reads a label file (magic number 2049), plain or ".gz": [count] bytes, each below `classes`.
/// Throws as read_idx_images does, and BadInput with index and value on a label out of range.
std::vector<uint8_t> read_idx_labels(const std::filesystem::path& path, int64_t classes);

/// Reads images (one channel) and labels that belong together; BadInput if their counts differ.
/// Name and normalisation of the result are left to the caller.
Dataset read_idx_dataset(const std::filesystem::path& images, const std::filesystem::path& labels,
                         int64_t classes);

}  // namespace lockstep
