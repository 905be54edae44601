// Data sets: where their files are searched for, IDX, CIFAR-10, the synthetic set. A good file is
// read byte for byte, and whatever is wrong ends in one line that names the file and what was found
// (rows 1 to 9 of the test table).

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>

#include "common/core/error.h"
#include "common/data/dataset.h"
#include "common/data/dataset_files.h"
#include "common/data/synthetic.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/system_calls.h"

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

// --- IDX -----------------------------------------------------------------------------------------

std::string refusal_of_images(const std::filesystem::path& path) {
  return message_of<BadInput>([&] { read_idx_images(path); });
}

bool is_one_line_about(const std::string& message, const std::string& file) {
  return message.find('\n') == std::string::npos && message.find(file) != std::string::npos;
}

TEST_CASE("Fashion-MNIST is 60000 and 10000 images of 28x28 in ten classes", "[idx][row1]") {
  const DatasetPair pair = load_dataset("fashion-mnist");
  CHECK(pair.train.count() == 60000);
  CHECK(pair.test.count() == 10000);
  for (const Dataset* set : {&pair.train, &pair.test}) {
    CHECK(set->height == 28);
    CHECK(set->width == 28);
    CHECK(set->channels == 1);
    CHECK(set->classes == 10);
    CHECK(set->images.size() == set->labels.size() * 784);
    std::vector<size_t> per_class(10);
    for (const uint8_t label : set->labels) ++per_class.at(label);
    CHECK(per_class == std::vector<size_t>(10, set->labels.size() / 10));
  }
  CHECK(pair.train.fingerprint() == 0x13976cd2);
  CHECK(pair.test.fingerprint() == 0x9aaa88fc);
}

TEST_CASE("A good IDX pair is read byte for byte, plain and gzip", "[idx][row1]") {
  const TempDir dir;
  testing::write_file(dir / "images", testing::idx_images(12));
  testing::write_file(dir / "labels", testing::idx_labels(12));
  testing::write_file(dir / "images.gz", testing::gzip(testing::idx_images(12)));
  testing::write_file(dir / "labels.gz", testing::gzip(testing::idx_labels(12)));
  for (const std::string ending : {"", ".gz"}) {
    const Dataset set = read_idx_dataset(dir / ("images" + ending), dir / ("labels" + ending), 10);
    CHECK(set.count() == 12);
    CHECK(set.height == 3);
    CHECK(set.width == 2);
    CHECK(set.images == testing::counting(72, 251));
    CHECK(set.labels == testing::counting(12, 10));
  }
}

TEST_CASE("A gzip file may have several members, and zeros for padding", "[idx][row1]") {
  const TempDir dir;
  const Bytes plain = testing::idx_images(2000);
  const auto part = [&](size_t from, size_t to) {
    return testing::gzip(Bytes(plain.begin() + ssize_t(from), plain.begin() + ssize_t(to)));
  };
  const auto read = [&](const std::vector<Bytes>& pieces) {
    Bytes all;
    for (const Bytes& piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
    testing::write_file(dir / "images.gz", all);
    return refusal_of_images(dir / "images.gz") == "nothing was thrown"
               ? read_idx_images(dir / "images.gz").pixels
               : Bytes();
  };
  const Bytes pixels = testing::counting(12'000, 251), zeros(1000), many_zeros(600'000);
  const Bytes none = part(0, 0), whole = part(0, plain.size());
  for (const size_t cut : {size_t{1}, size_t{16}, size_t{5000}, plain.size()}) {
    CHECK((read({part(0, cut), part(cut, plain.size())}) == pixels));
    CHECK((read({none, part(0, cut), zeros, part(cut, plain.size()), none, zeros}) == pixels));
  }
  CHECK((read({whole, zeros}) == pixels));
  CHECK((read({whole, many_zeros}) == pixels));  // more than is read at a time
  CHECK((read({part(0, 16), many_zeros, part(16, plain.size())}) == pixels));
  CHECK((read({many_zeros, whole}).empty()));
  CHECK((read({whole, whole}).empty()));  // more than the header promises
  CHECK((read({whole, Bytes{0, 0, 'x'}}).empty()));
  CHECK((read({whole, Bytes{0x1f}}).empty()));
  CHECK((read({whole, Bytes(whole.begin(), whole.begin() + 12)}).empty()));
}

TEST_CASE("Gzip data under a name without .gz gets the name that it should have", "[idx]") {
  const TempDir dir;
  testing::write_file(dir / "images", testing::gzip(testing::idx_images(20)));
  CHECK_THAT(
      refusal_of_images(dir / "images"),
      ContainsSubstring("images: found gzip data, expected it under a name that ends in .gz; "
                        "rename it to images.gz"));
}

TEST_CASE("A gzip IDX file may be as small as deflate makes one", "[idx][row1]") {
  const TempDir dir;
  const Bytes black(size_t{2000} * 784);
  testing::write_file(dir / "images.gz",
                      testing::gzip(testing::idx_bytes(2051, {2000, 28, 28}, black)));
  CHECK(std::filesystem::file_size(dir / "images.gz") < black.size() / 900);
  CHECK((read_idx_images(dir / "images.gz").pixels == black));
}

TEST_CASE("A wrong magic number is refused with the one found and the one expected",
          "[idx][row2]") {
  const TempDir dir;
  testing::write_file(dir / "labels", testing::idx_labels(8));
  const std::string message = refusal_of_images(dir / "labels");
  CHECK(is_one_line_about(message, (dir / "labels").string()));
  CHECK_THAT(message, ContainsSubstring("2049") && ContainsSubstring("expected 2051"));

  testing::write_file(dir / "images", testing::idx_images(1));
  CHECK_THAT(message_of<BadInput>([&] { read_idx_labels(dir / "images", 10); }),
             ContainsSubstring("2051") && ContainsSubstring("expected 2049"));
}

TEST_CASE("A truncated IDX file is refused with its size and the expected one", "[idx][row3]") {
  const TempDir dir;
  const Bytes whole = testing::idx_images(5);  // 16 + 30 bytes
  for (size_t size = 0; size < whole.size(); ++size) {
    testing::write_file(dir / "images", Bytes(whole.begin(), whole.begin() + size));
    const std::string message = refusal_of_images(dir / "images");
    CAPTURE(size, message);
    CHECK(is_one_line_about(message, (dir / "images").string()));
    CHECK_THAT(message, ContainsSubstring(std::to_string(size) + " bytes"));
    if (size >= 16) CHECK_THAT(message, ContainsSubstring("46 bytes"));
  }
}

TEST_CASE("Bytes after an IDX file's payload are refused", "[idx][row4]") {
  const TempDir dir;
  Bytes bytes = testing::idx_images(5);
  bytes.push_back(0);
  testing::write_file(dir / "images", bytes);
  CHECK_THAT(refusal_of_images(dir / "images"), ContainsSubstring("47 bytes") &&
                                                    ContainsSubstring("46 bytes") &&
                                                    ContainsSubstring("too long"));
  testing::write_file(dir / "images.gz", testing::gzip(bytes));
  CHECK_THAT(refusal_of_images(dir / "images.gz"),
             ContainsSubstring("more bytes") && ContainsSubstring("30"));
}

TEST_CASE("A gzip IDX file with too few bytes inside is refused", "[idx][row3]") {
  const TempDir dir;
  Bytes bytes = testing::idx_images(5);
  bytes.pop_back();
  testing::write_file(dir / "images.gz", testing::gzip(bytes));
  CHECK_THAT(refusal_of_images(dir / "images.gz"),
             ContainsSubstring("29 bytes") && ContainsSubstring("promises 30"));
}

TEST_CASE("Images and labels of different number are refused with both numbers", "[idx][row5]") {
  const TempDir dir;
  testing::write_file(dir / "images", testing::idx_images(5));
  testing::write_file(dir / "labels", testing::idx_labels(6));
  const std::string message =
      message_of<BadInput>([&] { read_idx_dataset(dir / "images", dir / "labels", 10); });
  CHECK_THAT(message, ContainsSubstring("5 images") && ContainsSubstring("6 labels"));
}

TEST_CASE("A label out of range is refused with its index and value", "[idx][row6]") {
  const TempDir dir;
  for (const uint8_t wrong : {10, 12, 255}) {
    Bytes bytes = testing::idx_labels(9);
    bytes[8 + 7] = wrong;
    testing::write_file(dir / "labels", bytes);
    const std::string message = message_of<BadInput>([&] { read_idx_labels(dir / "labels", 10); });
    CHECK(is_one_line_about(message, (dir / "labels").string()));
    CHECK_THAT(message, ContainsSubstring("label " + std::to_string(wrong) + " at index 7") &&
                            ContainsSubstring("expected 0 to 9"));
  }
}

int64_t peak_memory_kib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST_CASE("A header that promises 2^31 images is refused before memory is allocated",
          "[idx][row7]") {
  const TempDir dir;
  // 28x28: 1.6 TB. The largest header: 2^96 bytes, which would wrap around in 64 bits. 2^31 labels
  // could be allocated, and would show in the peak.
  const Bytes few(64);
  testing::write_file(dir / "a", testing::idx_bytes(2051, {1u << 31, 28, 28}, few));
  testing::write_file(dir / "b", testing::idx_bytes(2051, {~0u, ~0u, ~0u}, few));
  testing::write_file(dir / "c", testing::idx_bytes(2051, {1u << 31, 1, 1}, few));
  const int64_t before = peak_memory_kib();
  CHECK_THAT(refusal_of_images(dir / "a"), ContainsSubstring("2147483648 x 28 x 28"));
  CHECK_THAT(refusal_of_images(dir / "b"), ContainsSubstring("4294967295 x"));
  CHECK_THAT(refusal_of_images(dir / "c"), ContainsSubstring("2147483648 x 1 x 1"));
  for (const char* name : {"a", "b", "c"}) {
    const Bytes header = testing::idx_bytes(2051, {1u << 31, 1, name[0] == 'c' ? 1u : 28u}, few);
    testing::write_file(dir / (std::string(name) + ".gz"), testing::gzip(header));
    CHECK_THAT(refusal_of_images(dir / (std::string(name) + ".gz")),
               ContainsSubstring("can hold at most") && ContainsSubstring("2147483648 x"));
  }
  CHECK(peak_memory_kib() - before < 256 * 1024);
}

TEST_CASE("Images without pixels are refused", "[idx]") {
  const TempDir dir;
  testing::write_file(dir / "images", testing::idx_bytes(2051, {3, 0, 28}, {}));
  CHECK_THAT(refusal_of_images(dir / "images"), ContainsSubstring("0 x 28"));
}

TEST_CASE("A truncated gzip file is refused wherever it is cut", "[idx][row8]") {
  const TempDir dir;
  const Bytes whole = testing::gzip(testing::idx_images(20));
  for (size_t size = 0; size < whole.size(); ++size) {
    testing::write_file(dir / "images.gz", Bytes(whole.begin(), whole.begin() + size));
    const std::string message = refusal_of_images(dir / "images.gz");
    CAPTURE(size, message);
    CHECK(is_one_line_about(message, (dir / "images.gz").string()));
    CHECK_THAT(message, ContainsSubstring("truncated"));
  }
}

TEST_CASE("A damaged gzip file is refused: checksum, length, content, bytes after it",
          "[idx][row8]") {
  const TempDir dir;
  const Bytes whole = testing::gzip(testing::idx_images(20));
  const auto refusal = [&](const Bytes& bytes) {
    testing::write_file(dir / "images.gz", bytes);
    return refusal_of_images(dir / "images.gz");
  };
  Bytes bytes = whole;
  bytes[bytes.size() - 8] ^= 1;  // the trailer: CRC-32, then length
  CHECK_THAT(refusal(bytes), ContainsSubstring("incorrect data check"));
  bytes = whole;
  bytes[bytes.size() - 1] ^= 1;
  CHECK_THAT(refusal(bytes), ContainsSubstring("incorrect length check"));
  bytes = whole;
  bytes[bytes.size() / 2] ^= 16;
  CHECK_THAT(refusal(bytes), ContainsSubstring((dir / "images.gz").string()));
  bytes = whole;
  bytes.push_back('x');
  CHECK_THAT(refusal(bytes), ContainsSubstring("bytes that are no gzip data follow the end of it"));
  CHECK_THAT(refusal(testing::idx_images(20)), ContainsSubstring("incorrect header check"));
}

TEST_CASE("A file without permission, or with something else in its place, is refused",
          "[idx][row9]") {
  namespace fs = std::filesystem;
  const TempDir dir;
  testing::write_file(dir / "images", testing::idx_images(2));
  fs::permissions(dir / "images", fs::perms::none);
  std::string refusal;
  testing::without_capabilities(
      [&] { refusal = message_of<EnvironmentError>([&] { read_idx_images(dir / "images"); }); });
  CHECK(refusal == "cannot open " + (dir / "images").string() + ": Permission denied");

  fs::create_directory(dir / "folder");
  CHECK(refusal_of_images(dir / "folder") ==
        (dir / "folder").string() + " is a directory, expected a file");
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  CHECK_THAT(refusal_of_images(dir / "pipe"), ContainsSubstring("not a regular file"));
  CHECK(message_of<EnvironmentError>([&] { read_idx_images(dir / "nowhere"); }) ==
        "cannot open " + (dir / "nowhere").string() + ": No such file or directory");
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

TEST_CASE("Blank images have classes and take no memory", "[synthetic]") {
  const DatasetPair pair = load_dataset("blank:1000000:20");
  CHECK(pair.train.count() == 1000000);
  CHECK(pair.train.images.empty());
  std::vector<uint8_t> image(size_t(pair.test.image_bytes()), 7);
  int32_t label = -1;
  pair.test.read(13, image.data(), &label);
  CHECK(image == std::vector<uint8_t>(28 * 28, 0));
  CHECK(label == 3);
  CHECK_THAT(message_of<BadInput>([] { load_dataset("blank:0:20"); }),
             ContainsSubstring("training images: found '0'"));
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
  CHECK_THAT(refusal("synthetic:0:64"),
             ContainsSubstring("images: found '0', expected 1 to 1000000"));
  CHECK_THAT(refusal("synthetic:256:1000001"), ContainsSubstring("test images: found '1000001'"));
  CHECK_THAT(refusal("synthetic:-5:64"), ContainsSubstring("training images: found '-5'"));
  CHECK_THAT(refusal("synthetic:1e3:64"), ContainsSubstring("'1e3'"));
  CHECK_THAT(refusal("synthetic:256:64:9"), ContainsSubstring("'64:9'"));
  CHECK_THAT(refusal("synthetic:99999999999999999999:1"), ContainsSubstring("expected 1 to"));
  CHECK_THAT(refusal("synthetic:256"), ContainsSubstring("synthetic:TRAIN:TEST"));
}

}  // namespace
}  // namespace lockstep
