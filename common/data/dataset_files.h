#pragma once
// The files of data sets: where they are, and what is read of them, plain or packed by gzip.
//
// IDX is the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist): big-endian
// 32-bit words, first the magic number, then one word per dimension, then the bytes. The binary
// version of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html) has records of 3073 bytes: a
// label and 32x32 pixels, all red, then all green, then all blue.
//
// Strict: a file is used only if its size is exactly what its header promises.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/data/dataset.h"

namespace lockstep {

/// The folder that holds `files` (or some of them; plain or with ".gz" added) of data set `name`:
///  1. `dir` (--data-dir), if given, and then nowhere else: a user who names a folder means it;
///  2. the folder of the environment variable LOCKSTEP_DATA;
///  3. data/NAME below the current directory;
///  4. for fashion-mnist the folder of Debian's package dataset-fashion-mnist.
/// In the folders of 1 and 2 the files may be in a sub-folder NAME. Throws EnvironmentError with
/// all places looked at and how to get the data.
std::filesystem::path find_dataset_dir(const std::string& name, const std::string& dir,
                                       const std::vector<std::string>& files);

/// `dir`/`file`, or the same with ".gz" if only that is there. Throws EnvironmentError, saying how
/// to get data set `name`, if neither is.
std::filesystem::path find_dataset_file(const std::string& name, const std::filesystem::path& dir,
                                        const std::string& file);

/// Images of an IDX file of magic number 2051.
struct IdxImages {
  int64_t count = 0;
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> pixels;  ///< [count, height, width]
};

/// Reads an image file, plain or ".gz". Throws BadInput, naming the file, on a wrong magic number
/// or damaged gzip data. The same for a size that the header does not promise (checked before
/// memory is allocated if the file is plain). Throws EnvironmentError if the file cannot be opened.
IdxImages read_idx_images(const std::filesystem::path& path);

/// Reads a label file (magic number 2049), plain or ".gz": [count] bytes, each below `classes`.
/// Throws as read_idx_images does, and BadInput with index and value on a label out of range.
std::vector<uint8_t> read_idx_labels(const std::filesystem::path& path, int64_t classes);

/// Reads images (one channel) and labels that belong together; BadInput if their counts differ.
/// Name and normalisation of the result are left to the caller.
Dataset read_idx_dataset(const std::filesystem::path& images, const std::filesystem::path& labels,
                         int64_t classes);

/// Reads `files` (plain or ".gz") one after another, pixels turned from planes to [32, 32, 3].
/// Throws BadInput, naming the file, if it is empty or not a whole number of records or has a label
/// above 9. Throws EnvironmentError if it cannot be opened. Name and normalisation of the result
/// are left to the caller.
Dataset read_cifar10(const std::vector<std::filesystem::path>& files);

}  // namespace lockstep
