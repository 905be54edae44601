// The IDX reader: a good set is read byte for byte, and whatever is wrong ends in one line that
// names the file and what was found (rows 1 to 9 of the test table).

#include "common/data/idx.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::Bytes;
using testing::message_of;
using testing::TempDir;

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

// Runs the reader as a user without rights, in a child process; returns the message it gets.
std::string refusal_without_rights(const std::filesystem::path& path) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    // Root passes every permission check; anybody else is already without rights.
    const bool ready = ::geteuid() != 0 || ::setuid(kNobody) == 0;
    const std::string message =
        ready ? message_of<EnvironmentError>([&] { read_idx_images(path); }) : "setuid failed";
    const ssize_t written = ::write(ends[1], message.data(), message.size());
    ::_exit(written == static_cast<ssize_t>(message.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string message(1000, '\0');
  const ssize_t got = ::read(ends[0], message.data(), message.size());
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  message.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return message;
}

TEST_CASE("A file without permission, or with something else in its place, is refused",
          "[idx][row9]") {
  namespace fs = std::filesystem;
  const TempDir dir;
  fs::permissions(dir.path(), fs::perms(0755));
  testing::write_file(dir / "images", testing::idx_images(2));
  fs::permissions(dir / "images", fs::perms::none);
  CHECK(refusal_without_rights(dir / "images") ==
        "cannot open " + (dir / "images").string() + ": Permission denied");

  fs::create_directory(dir / "folder");
  CHECK(refusal_of_images(dir / "folder") ==
        (dir / "folder").string() + " is a directory, expected a file");
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  CHECK_THAT(refusal_of_images(dir / "pipe"), ContainsSubstring("not a regular file"));
  CHECK(message_of<EnvironmentError>([&] { read_idx_images(dir / "nowhere"); }) ==
        "cannot open " + (dir / "nowhere").string() + ": No such file or directory");
}

}  // namespace
}  // namespace lockstep
