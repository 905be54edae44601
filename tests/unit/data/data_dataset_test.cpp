// Data sets by name: where their files are searched for, CIFAR-10's format, the synthetic set.

#include <algorithm>

#include "common/core/error.h"
#include "common/data/cifar.h"
#include "common/data/dataset.h"
#include "common/data/dataset_files.h"
#include "common/data/synthetic.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using testing::Bytes;
using testing::message_of;
using testing::ScopedEnvironment;
using testing::TempDir;

/// Makes another directory the current one while the object exists.
class ScopedDirectory {
 public:
  explicit ScopedDirectory(const fs::path& path) : before_(fs::current_path()) {
    fs::current_path(path);
  }
  ~ScopedDirectory() { fs::current_path(before_); }
  ScopedDirectory(const ScopedDirectory&) = delete;
  ScopedDirectory& operator=(const ScopedDirectory&) = delete;

 private:
  fs::path before_;
};

void write_mnist(const fs::path& dir, uint32_t train, uint32_t test) {
  testing::write_file(dir / "train-images-idx3-ubyte.gz",
                      testing::gzip(testing::idx_images(train)));
  testing::write_file(dir / "train-labels-idx1-ubyte", testing::idx_labels(train));
  testing::write_file(dir / "t10k-images-idx3-ubyte", testing::idx_images(test));
  testing::write_file(dir / "t10k-labels-idx1-ubyte.gz", testing::gzip(testing::idx_labels(test)));
}

TEST_CASE("--data-dir may hold the files, or a folder named as the data set", "[data]") {
  const TempDir dir;
  write_mnist(dir / "flat", 11, 3);
  write_mnist(dir / "mnist", 12, 4);
  const DatasetPair flat = load_dataset("mnist", (dir / "flat").string());
  CHECK(flat.train.count() == 11);
  CHECK(flat.test.count() == 3);
  CHECK(load_dataset("mnist", dir.path().string()).train.count() == 12);
  CHECK(flat.train.name == "mnist");
  CHECK(flat.train.mean == 0.1307);
  CHECK(flat.train.stddev == 0.3081);
}

TEST_CASE("A set without images is named", "[data]") {
  const TempDir dir;
  write_mnist(dir / "no-train", 0, 3);
  write_mnist(dir / "no-test", 3, 0);
  for (const std::string set : {"train", "test"}) {
    CHECK_THAT(message_of<BadInput>([&] { load_dataset("mnist", (dir / ("no-" + set)).string()); }),
               ContainsSubstring("--data mnist: the " + set) &&
                   ContainsSubstring(
                       " set is empty: found 0 images and so 0 batches, expected 1 or more"));
  }
}

TEST_CASE("--data-dir comes before LOCKSTEP_DATA, which comes before ./data", "[data]") {
  const TempDir dir;
  write_mnist(dir / "option", 11, 3);
  write_mnist(dir / "environment", 12, 3);
  write_mnist(dir / "work/data/mnist", 13, 3);
  const ScopedDirectory work(dir / "work");
  const ScopedEnvironment unset("LOCKSTEP_DATA", std::nullopt);
  CHECK(load_dataset("mnist").train.count() == 13);
  // What a shell leaves of a variable that was not set is no folder, and not this one.
  write_mnist(dir / "work", 14, 3);
  const ScopedEnvironment nameless("LOCKSTEP_DATA", "");
  CHECK(load_dataset("mnist").train.count() == 13);
  const ScopedEnvironment set("LOCKSTEP_DATA", (dir / "environment").string());
  CHECK(load_dataset("mnist").train.count() == 12);
  CHECK(load_dataset("mnist", (dir / "option").string()).train.count() == 11);
  // Nothing of mnist there: the search goes on.
  const ScopedEnvironment empty("LOCKSTEP_DATA", (dir / "nothing").string());
  CHECK(load_dataset("mnist").train.count() == 13);
}

TEST_CASE("Missing data is one line with the places looked at and how to get it", "[data][row9]") {
  const TempDir dir;
  fs::create_directory(dir / "empty");
  const std::string empty = (dir / "empty").string();
  const auto refusal = [](const std::string& name, const std::string& in) {
    return message_of<EnvironmentError>([&] { load_dataset(name, in); });
  };
  // --data-dir is binding: Debian's package is not taken in its place.
  for (const std::string name : {"fashion-mnist", "mnist", "cifar10"}) {
    const std::string message = refusal(name, empty);
    CHECK_THAT(message, ContainsSubstring(empty + "/" + name + ", " + empty) &&
                            ContainsSubstring("./lockstep data " + name) &&
                            ContainsSubstring("--data synthetic"));
    CHECK(message.find('\n') == std::string::npos);
  }
  const ScopedDirectory work(dir / "empty");
  const ScopedEnvironment set("LOCKSTEP_DATA", "/nowhere");
  CHECK_THAT(refusal("mnist", ""),
             ContainsSubstring("/nowhere/mnist, /nowhere, data/mnist; fetch"));
}

TEST_CASE("One missing file is named by its path", "[data][row9]") {
  const TempDir dir;
  write_mnist(dir.path(), 11, 3);
  fs::remove(dir / "train-labels-idx1-ubyte");
  const std::string message =
      message_of<EnvironmentError>([&] { load_dataset("mnist", dir.path().string()); });
  CHECK_THAT(message,
             ContainsSubstring((dir / "train-labels-idx1-ubyte").string() + " is missing") &&
                 ContainsSubstring("./lockstep data mnist"));
  fs::create_directory(dir / "train-labels-idx1-ubyte");
  CHECK_THAT(message_of<BadInput>([&] { load_dataset("mnist", dir.path().string()); }),
             ContainsSubstring("is a directory, expected a file"));
}

TEST_CASE("Training and test images of different size are refused", "[data]") {
  const TempDir dir;
  write_mnist(dir.path(), 11, 3);
  testing::write_file(dir / "t10k-images-idx3-ubyte",
                      testing::idx_bytes(2051, {3, 2, 2}, testing::counting(12, 251)));
  CHECK_THAT(message_of<BadInput>([&] { load_dataset("mnist", dir.path().string()); }),
             ContainsSubstring("3x2x1") && ContainsSubstring("2x2x1"));
}

TEST_CASE("An unknown data set is refused with the list of those known", "[data]") {
  CHECK_THAT(message_of<BadInput>([] { load_dataset("imagenet"); }),
             ContainsSubstring("'imagenet'") &&
                 ContainsSubstring("fashion-mnist, mnist, cifar10, synthetic"));
}

TEST_CASE("A fingerprint tells two data sets apart", "[data]") {
  Dataset set = make_synthetic(SyntheticPart::train, 20);
  const uint32_t before = set.fingerprint();
  CHECK(make_synthetic(SyntheticPart::train, 20).fingerprint() == before);
  set.images[5000] ^= 1;
  CHECK(set.fingerprint() != before);
  set.images[5000] ^= 1;
  set.labels[19] ^= 1;
  CHECK(set.fingerprint() != before);
  set.labels[19] ^= 1;
  std::swap(set.height, set.channels);
  CHECK(set.fingerprint() != before);
}

// --- CIFAR-10 ----------------------------------------------------------------------------------

uint8_t cifar_byte(size_t sample, size_t channel, size_t pixel) {
  return static_cast<uint8_t>(sample * 7 + channel * 100 + pixel * 3);
}

// `count` records from sample number `first` on; label: sample number mod 10.
Bytes cifar_batch(size_t first, size_t count) {
  Bytes bytes;
  for (size_t sample = first; sample < first + count; ++sample) {
    bytes.push_back(static_cast<uint8_t>(sample % 10));
    for (size_t channel = 0; channel < 3; ++channel)
      for (size_t pixel = 0; pixel < 1024; ++pixel)
        bytes.push_back(cifar_byte(sample, channel, pixel));
  }
  return bytes;
}

void write_cifar(const fs::path& dir) {
  for (size_t i = 0; i < 5; ++i)
    testing::write_file(dir / ("data_batch_" + std::to_string(i + 1) + ".bin"),
                        cifar_batch(i * 3, 3));
  testing::write_file(dir / "test_batch.bin", cifar_batch(100, 2));
}

void check_cifar_sample(const Dataset& set, size_t index, size_t sample) {
  std::vector<uint8_t> image(3072);
  int32_t label = -1;
  set.read(static_cast<int64_t>(index), image.data(), &label);
  CHECK(label == static_cast<int32_t>(sample % 10));
  bool equal = true;
  for (size_t pixel = 0; pixel < 1024; ++pixel)
    for (size_t channel = 0; channel < 3; ++channel)
      equal = equal && image[pixel * 3 + channel] == cifar_byte(sample, channel, pixel);
  CHECK(equal);
}

TEST_CASE("CIFAR-10 becomes channels last, the five batches in order", "[cifar]") {
  const TempDir dir;
  write_cifar(dir / "flat");
  write_cifar(dir / "archive/cifar-10-batches-bin");
  for (const char* where : {"flat", "archive"}) {
    const DatasetPair pair = load_dataset("cifar10", (dir / where).string());
    CHECK(pair.train.count() == 15);
    CHECK(pair.test.count() == 2);
    CHECK(pair.train.image_bytes() == 3072);
    CHECK(pair.train.channels == 3);
    CHECK(pair.train.mean == 0.5);
    CHECK(pair.train.stddev == 0.5);
    for (size_t i = 0; i < 15; ++i) check_cifar_sample(pair.train, i, i);
    for (size_t i = 0; i < 2; ++i) check_cifar_sample(pair.test, i, 100 + i);
  }
}

TEST_CASE("A CIFAR-10 file of more records than are read at once is whole, gzip too", "[cifar]") {
  const TempDir dir;
  testing::write_file(dir / "a.bin", cifar_batch(0, 250));
  testing::write_file(dir / "a.bin.gz", testing::gzip(cifar_batch(0, 250)));
  for (const char* name : {"a.bin", "a.bin.gz"}) {
    const Dataset set = read_cifar10({dir / name});
    REQUIRE(set.count() == 250);
    for (const size_t i : {0, 99, 100, 249}) check_cifar_sample(set, i, i);
  }
}

TEST_CASE("A CIFAR-10 file that is not whole records, or is missing, is refused", "[cifar]") {
  const TempDir dir;
  write_cifar(dir.path());
  const fs::path file = dir / "data_batch_3.bin";
  const auto load = [&] { load_dataset("cifar10", dir.path().string()); };
  const Bytes whole = cifar_batch(6, 3);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{3072}, size_t{3074}, whole.size() - 1}) {
    testing::write_file(file, Bytes(whole.begin(), whole.begin() + size));
    CHECK_THAT(message_of<BadInput>(load),
               ContainsSubstring(file.string() + ": " + std::to_string(size) + " bytes") &&
                   ContainsSubstring("3073"));
  }
  Bytes wrong_label = whole;
  wrong_label[2 * 3073] = 10;
  testing::write_file(file, wrong_label);
  CHECK_THAT(message_of<BadInput>(load),
             ContainsSubstring(file.string() + ": label 10 at index 2"));
  fs::remove(file);
  CHECK_THAT(message_of<EnvironmentError>(load), ContainsSubstring(file.string() + " is missing"));
}

// --- Synthetic ---------------------------------------------------------------------------------

TEST_CASE("Synthetic data is the same bytes on every machine", "[synthetic]") {
  const DatasetPair pair = load_dataset("synthetic");
  CHECK(pair.train.count() == 6000);
  CHECK(pair.test.count() == 1000);
  CHECK(pair.train.image_bytes() == 784);
  CHECK(pair.train.fingerprint() == 0xece9bc55);
  CHECK(pair.test.fingerprint() == 0xdda6cfc1);
}

TEST_CASE("A short synthetic set is the beginning of a long one", "[synthetic]") {
  const DatasetPair small = load_dataset("synthetic:256:64");
  CHECK(small.train.count() == 256);
  CHECK(small.test.count() == 64);
  const Dataset large = make_synthetic(SyntheticPart::train, 300);
  CHECK(std::equal(small.train.images.begin(), small.train.images.end(), large.images.begin()));
  CHECK(!std::equal(small.test.images.begin(), small.test.images.end(), large.images.begin()));
}

// The class whose mean training image is nearest.
int nearest_class(const std::vector<std::vector<double>>& means, const uint8_t* image) {
  std::vector<double> distance(means.size(), 0.0);
  for (size_t label = 0; label < means.size(); ++label)
    for (size_t i = 0; i < means[label].size(); ++i)
      distance[label] += (means[label][i] - image[i]) * (means[label][i] - image[i]);
  return static_cast<int>(std::min_element(distance.begin(), distance.end()) - distance.begin());
}

TEST_CASE("Synthetic classes can be learnt, and differ from sample to sample", "[synthetic]") {
  const DatasetPair pair = load_dataset("synthetic:2000:500");
  std::vector<std::vector<double>> means(10, std::vector<double>(784, 0.0));
  for (size_t n = 0; n < 2000; ++n)
    for (size_t i = 0; i < 784; ++i)
      means[pair.train.labels[n]][i] += pair.train.images[n * 784 + i] / 200.0;
  int right = 0;
  for (size_t n = 0; n < 500; ++n)
    right += nearest_class(means, &pair.test.images[n * 784]) == pair.test.labels[n];
  CHECK(right >= 450);

  const auto image = [&](size_t n) { return pair.train.images.begin() + n * 784; };
  CHECK(!std::equal(image(0), image(1), image(10)));  // two samples of class 0
}

TEST_CASE("Sizes of the synthetic set out of range are refused with the value", "[synthetic]") {
  const auto refusal = [](const std::string& name) {
    return message_of<BadInput>([&] { load_dataset(name); });
  };
  CHECK_THAT(refusal("synthetic:0:64"), ContainsSubstring("'0', expected 1 to 1000000"));
  CHECK_THAT(refusal("synthetic:256:1000001"), ContainsSubstring("test images '1000001'"));
  CHECK_THAT(refusal("synthetic:-5:64"), ContainsSubstring("training images '-5'"));
  CHECK_THAT(refusal("synthetic:1e3:64"), ContainsSubstring("'1e3'"));
  CHECK_THAT(refusal("synthetic:256:64:9"), ContainsSubstring("'64:9'"));
  CHECK_THAT(refusal("synthetic:99999999999999999999:1"), ContainsSubstring("expected 1 to"));
  CHECK_THAT(refusal("synthetic:256"), ContainsSubstring("synthetic:TRAIN:TEST"));
}

}  // namespace
}  // namespace lockstep
