#include "common/data/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "common/core/error.h"
#include "common/data/dataset_files.h"
#include "common/data/synthetic.h"

namespace lockstep {
namespace {

struct Normalisation {
  double mean;
  double stddev;
};
constexpr Normalisation kMnist{0.1307, 0.3081};
constexpr Normalisation kCifar{0.5, 0.5};

void describe(Dataset& set, const std::string& name, Normalisation normalisation) {
  set.name = name;
  set.mean = normalisation.mean;
  set.stddev = normalisation.stddev;
}

DatasetPair load_mnist_family(const std::string& name, const std::string& dir) {
  const auto folder = find_dataset_dir(name, dir,
                                       {"train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                                        "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"});
  const auto load = [&](const std::string& part) {
    return read_idx_dataset(find_dataset_file(name, folder, part + "-images-idx3-ubyte"),
                            find_dataset_file(name, folder, part + "-labels-idx1-ubyte"), kClasses);
  };
  // The small part first: an error in it shows before the large one is inflated.
  Dataset test = load("t10k");
  return {load("train"), std::move(test)};
}

DatasetPair load_cifar10(const std::string& dir) {
  // The archive unpacks to this folder; it may have been left there.
  const std::string folder = "cifar-10-batches-bin/";
  std::vector<std::string> train = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                                    "data_batch_4.bin", "data_batch_5.bin"};
  const auto base = find_dataset_dir("cifar10", dir, {train[0], folder + train[0]});
  std::error_code error;
  const auto inner = std::filesystem::is_directory(base / folder, error) ? base / folder : base;

  std::vector<std::filesystem::path> paths;
  for (const std::string& file : train) paths.push_back(find_dataset_file("cifar10", inner, file));
  const auto test = find_dataset_file("cifar10", inner, "test_batch.bin");
  return {read_cifar10(paths), read_cifar10({test})};
}

DatasetPair load_described(const std::string& name, const std::string& dir) {
  if (name == "fashion-mnist" || name == "mnist") {
    DatasetPair pair = load_mnist_family(name, dir);
    for (Dataset* set : {&pair.train, &pair.test}) describe(*set, name, kMnist);
    return pair;
  }
  if (name == "cifar10") {
    DatasetPair pair = load_cifar10(dir);
    for (Dataset* set : {&pair.train, &pair.test}) describe(*set, name, kCifar);
    return pair;
  }
  if (name.starts_with("blank:")) {
    const SyntheticSizes sizes = parse_synthetic(name);
    DatasetPair pair{make_blank(sizes.train), make_blank(sizes.test)};
    for (Dataset* set : {&pair.train, &pair.test}) describe(*set, "blank", kMnist);
    return pair;
  }
  if (name == "synthetic" || name.starts_with("synthetic:")) {
    const SyntheticSizes sizes = parse_synthetic(name);
    DatasetPair pair{make_synthetic(SyntheticPart::train, sizes.train),
                     make_synthetic(SyntheticPart::test, sizes.test)};
    for (Dataset* set : {&pair.train, &pair.test}) describe(*set, "synthetic", kMnist);
    return pair;
  }
  fail<BadInput>(
      "--data: unknown data set '{}', expected fashion-mnist, mnist, cifar10, synthetic, "
      "synthetic:TRAIN:TEST or blank:TRAIN:TEST",
      name);
}

void check_not_empty(const std::string& name, const DatasetPair& pair) {
  for (const auto& [set, what] :
       {std::pair(&pair.train, "training"), std::pair(&pair.test, "test")}) {
    require(set->count() > 0,
            "--data {}: the {} set is empty: found 0 images and so 0 batches, expected 1 or more; "
            "fetch it again, or give another --data-dir",
            name, what);
  }
}

void check_same_shape(const Dataset& train, const Dataset& test) {
  require(
      train.height == test.height && train.width == test.width && train.channels == test.channels,
      "{}: training images are {}x{}x{}, test images {}x{}x{}: expected the same", train.name,
      train.height, train.width, train.channels, test.height, test.width, test.channels);
}

}  // namespace

void Dataset::read(int64_t index, uint8_t* image, int32_t* label) const {
  const auto bytes = static_cast<size_t>(image_bytes());
  const auto i = static_cast<size_t>(index);
  if (images.empty()) {
    std::memset(image, 0, bytes);
  } else {
    std::memcpy(image, images.data() + i * bytes, bytes);
  }
  *label = labels[i];
}

uint32_t Dataset::fingerprint() const {
  const std::string shape = fmt::format("{}x{}x{}x{}", count(), height, width, channels);
  uLong crc = crc32_z(0, reinterpret_cast<const Bytef*>(shape.data()), shape.size());
  crc = crc32_z(crc, images.data(), images.size());
  return static_cast<uint32_t>(crc32_z(crc, labels.data(), labels.size()));
}

DatasetPair load_dataset(const std::string& name, const std::string& dir) {
  DatasetPair pair = load_described(name, dir);
  check_not_empty(name, pair);
  check_same_shape(pair.train, pair.test);
  return pair;
}

void check_labels(std::span<const uint8_t> labels, int64_t classes, const std::string& what) {
  const auto wrong = std::find_if(labels.begin(), labels.end(),
                                  [&](uint8_t label) { return int64_t{label} >= classes; });
  if (wrong == labels.end()) return;
  fail<BadInput>("{}: label {} at index {}, expected 0 to {}", what, *wrong, wrong - labels.begin(),
                 classes - 1);
}

}  // namespace lockstep
