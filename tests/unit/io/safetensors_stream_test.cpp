// safetensors files that stay on the disk: the same rules as for those in memory.

#include "common/io/safetensors_stream.h"

#include "tests/support/catch.h"
#include "tests/unit/io/safetensors_samples.h"

namespace lockstep {
namespace {

using namespace testing::samples;
using Catch::Matchers::ContainsSubstring;

/// The text of the BadInput that `body` throws, "" if it throws none.
template <class Body>
std::string refusal_of(Body&& body) {
  try {
    body();
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

/// Reads every tensor of a file.
void read_all(const std::filesystem::path& path) {
  const SafetensorsStream stream(path);
  for (const StoredTensor& tensor : stream.tensors()) stream.read(tensor);
}

std::string sealed_stream_file() {
  const Sample sample = golden_tensors();
  return to_string(serialize_safetensors(sample.entries, {{"format", "pt"}}, Checksums::crc32));
}

TEST_CASE("A file read tensor by tensor has what it has when it is read at once",
          "[safetensors][row106]") {
  const ScratchDirectory directory;
  for (const std::string& bytes : {golden_file(), sealed_stream_file()}) {
    write_text(directory / "file", bytes);
    const SafetensorsFile whole = load_safetensors(directory / "file");
    const SafetensorsStream stream(directory / "file");
    CHECK(stream.metadata() == whole.metadata());
    CHECK(stream.checksums() == whole.checksums());
    CHECK(stream.header_checksum() == whole.header_checksum());
    REQUIRE(stream.tensors().size() == whole.tensors().size());
    for (size_t i = 0; i < whole.tensors().size(); ++i) {
      const StoredTensor& stored = stream.tensors()[i];
      const std::vector<std::byte> read = stream.read(stored);
      CHECK(same_tensor({stored.name, stored.dtype, stored.shape, read}, whole.tensors()[i]));
      CHECK(stream.find(stored.name) == &stored);
    }
    CHECK(stream.find("no such tensor") == nullptr);
  }
}

TEST_CASE("A range of a tensor is read alone, and no further than the tensor", "[safetensors]") {
  const ScratchDirectory directory;
  write_text(directory / "file", golden_file());
  const SafetensorsStream stream(directory / "file");
  const StoredTensor& mask = *stream.find("mask");      // 3 elements of 1 byte
  const StoredTensor& weight = *stream.find("weight");  // 2 elements of 8
  std::vector<std::byte> bytes(2);
  stream.read(mask, 1, bytes);
  CHECK(to_string(bytes) == std::string("\x00\x01", 2));
  bytes.resize(8);
  stream.read(weight, 1, bytes);
  CHECK(to_string(bytes) == std::string("\0\0\0\0\0\0\0\xC0", 8));
  for (const uint64_t first : {uint64_t(2), uint64_t(3), uint64_t(1) << 61}) {
    CHECK_THAT(refusal_of([&] { stream.read(weight, first, bytes); }),
               ContainsSubstring("tensor \"weight\" has 16 bytes, expected 8 from element"));
  }
}

TEST_CASE("What is refused in memory is refused on the disk, and in the same words",
          "[safetensors][row114]") {
  const ScratchDirectory directory;
  const std::string whole = sealed_stream_file();
  std::vector<std::string> broken{"", "short", "PK\x03\x04 a pickle", whole + "x"};
  for (size_t cut = 1; cut < whole.size(); cut += 7) broken.push_back(whole.substr(0, cut));
  for (size_t byte = 0; byte < whole.size(); byte += 3) {
    broken.push_back(whole);
    broken.back()[byte] ^= 4;
  }
  for (const std::string& bytes : broken) {
    write_text(directory / "file", bytes);
    const std::string in_memory = refusal_of([&] { load_safetensors(directory / "file"); });
    CHECK(!in_memory.empty());
    CHECK(refusal_of([&] { read_all(directory / "file"); }) == in_memory);
  }
}

TEST_CASE("A header of 640 bytes is none of torch.save()'s files, which begin alike",
          "[safetensors]") {
  const ScratchDirectory directory;
  const auto refusal = [&](const std::string& bytes) {
    write_text(directory / "file", bytes);
    const std::string in_memory = refusal_of([&] { load_safetensors(directory / "file"); });
    CHECK(refusal_of([&] { read_all(directory / "file"); }) == in_memory);
    return in_memory;
  };
  const std::string header = "{" + std::string(638, ' ') + "}";
  REQUIRE(file_of(header).starts_with("\x80\x02"));
  CHECK(refusal(file_of(header)).empty());
  for (const std::string& pickle : {"\x80\x02\x8a\x0a"s + "l\xfc\x9c\x46"s, "\x80\x02"s,
                                    "PK\x03\x04"s + std::string(40, '\x14')}) {
    CHECK_THAT(refusal(pickle), ContainsSubstring("found a file of torch.save()"));
  }
}

TEST_CASE("Files of other formats are told what they are", "[safetensors]") {
  const ScratchDirectory directory;
  const auto zip = [](const std::string& member) {
    return "PK\x03\x04"s + std::string(22, '\0') + char(member.size()) + std::string(3, '\0') +
           member + std::string(40, '\x93');
  };
  std::string tar = "a" + std::string(511, '\0');  // its first 8 bytes could be a length
  tar.replace(257, 5, "ustar");
  const std::pair<std::string, const char*> files[] = {
      {zip("weights/data.pkl"), "found a file of torch.save()"},
      {zip("arr_0.npy"), "found a file of numpy.savez() (.npz)"},
      {"\x93NUMPY\x01\0v\0{'descr'"s, "found one array of numpy.save() (.npy)"},
      {"\x80\x04\x95\x05\0\0\0\0\0\0\0}\x94."s, "found a pickle of Python (protocol 4)"},
      {"\x80\x05\x95\x05\0\0\0\0\0\0\0}\x94."s, "found a pickle of Python (protocol 5)"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n",
       "a pointer of Git LFS"},
      {"<!DOCTYPE html>\n<html>", "found a web page (HTML)"},
      {"\n  <HTML><head>", "found a web page (HTML)"},
      {"GGUF\x03\0\0\0\x10\0\0\0"s, "found a GGUF file"},
      {"\x89HDF\r\n\x1a\n\0\0"s, "found an HDF5 file"},
      {"\x1f\x8b\x08\0\0\0\0\0\0\x03"s, "found gzip data"},
      {tar, "found a tar archive"}};
  for (const auto& [bytes, expected] : files) {
    write_text(directory / "file", bytes);
    const std::string in_memory = refusal_of([&] { load_safetensors(directory / "file"); });
    CHECK_THAT(in_memory, ContainsSubstring((directory / "file").string() + ": ") &&
                              ContainsSubstring(expected));
    CHECK(refusal_of([&] { read_all(directory / "file"); }) == in_memory);
  }
}

}  // namespace
}  // namespace lockstep
