// Checksums of safetensors files: what is damaged is found.

#include <fmt/ranges.h>

#include "common/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/mutator.h"
#include "tests/support/safetensors_support.h"
#include "tests/unit/io/safetensors_samples.h"

namespace lockstep {
namespace {

using namespace testing::samples;
using namespace lockstep::testing::io;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

// --- Checksums -----------------------------------------------------------------------------------

std::string sealed_file() {
  const Sample sample = golden_tensors();
  return to_string(serialize_safetensors(sample.entries, golden_metadata(), Checksums::crc32));
}

/// `text` with `from` replaced, once.
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  if (at == text.npos) throw std::logic_error("no " + from + " in " + text);
  return text.replace(at, from.size(), to);
}

/// The length of a header that was changed, put right.
std::string with_right_length(const std::string& changed, std::size_t payload) {
  const std::size_t header = changed.size() - 8 - payload;
  return file_of(changed.substr(8, header), changed.substr(8 + header));
}

constexpr std::size_t kGoldenPayload = 47;

TEST_CASE("Checksums do not show in what is read, and stand for the file",
          "[safetensors][row106][row114]") {
  const SafetensorsFile file = parse_safetensors(to_bytes(sealed_file()), "sealed");
  CHECK(file.checksums() == Checksums::crc32);
  CHECK(file.metadata() == golden_metadata());
  CHECK(file.tensors().size() == golden_tensors().entries.size());
  const SafetensorsFile plain = parse_safetensors(to_bytes(golden_file()), "plain");
  CHECK(plain.checksums() == Checksums::none);
  CHECK(plain.header_checksum() == "");

  const ScratchDirectory directory;
  const Sample sample = golden_tensors();
  const auto save = [&](Checksums checksums) {
    return save_safetensors(directory / "file", sample.entries, golden_metadata(), checksums);
  };
  CHECK(save(Checksums::crc32) == file.header_checksum());
  CHECK(read_text(directory / "file") == sealed_file());
  CHECK(save(Checksums::none) == "");
  Sample other = golden_tensors();
  other.entries[0].bytes = std::as_bytes(std::span("\x7F", 1));
  const auto changed = serialize_safetensors(other.entries, golden_metadata(), Checksums::crc32);
  CHECK(parse_safetensors(changed, "other").header_checksum() != file.header_checksum());
}

// As a user would check them.
constexpr const char* kPythonChecksums = R"PY(
import json, struct, sys, zlib
data = open(sys.argv[1], 'rb').read()
(n,) = struct.unpack('<Q', data[:8])
header, payload = json.loads(data[8:8 + n]), data[8 + n:]
text = header.pop('__metadata__')
own = text['lockstep.crc32.header']
place = '"lockstep.crc32.header":"'
zeroed = data[:8 + n].replace((place + own).encode(), (place + '0' * 8).encode())
assert own == f'{zlib.crc32(zeroed):08x}', 'header'
for name, t in header.items():
    begin, end = t['data_offsets']
    assert text['lockstep.crc32.tensor.' + name] == f'{zlib.crc32(payload[begin:end]):08x}', name
assert len(text) == len(header) + 2
print('all right')
)PY";

TEST_CASE("Python's zlib finds the same checksums", "[safetensors][row114]") {
  const ScratchDirectory directory;
  write_text(directory / "sealed", sealed_file());
  write_text(directory / "check.py", kPythonChecksums);
  CHECK(output_of(fmt::format("python3 '{0}/check.py' '{0}/sealed' 2>&1",
                              directory.path().string())) == "all right\n");
}

TEST_CASE("One flipped bit anywhere is found where there are checksums", "[safetensors][row114]") {
  const std::string whole = sealed_file();
  REQUIRE(check_parser(whole) == "");
  // In the short campaign two bits of every byte or so; checkpoints have all of theirs flipped.
  for (std::size_t bit = 0; bit < 8 * whole.size(); bit += testing::full_campaign() ? 1 : 5) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    if (check_parser(flipped).empty()) FAIL("bit " << bit % 8 << " of byte " << bit / 8);
  }
}

TEST_CASE("Each breach of the checksums has an error of its own", "[safetensors][row114]") {
  const std::string whole = sealed_file();
  const auto refuses = [&](const std::string& changed, const std::string& text) {
    CHECK_THAT(check_parser(with_right_length(changed, kGoldenPayload)), ContainsSubstring(text));
  };
  std::string payload = whole;
  payload[payload.size() - kGoldenPayload] ^= 1;
  refuses(payload, "tensor \"steps\" has the checksum ");
  refuses(replaced(whole, "lockstep.crc32.tensor.mask", "something.else.to.read.it_"),
          "the header has the checksum ");
  refuses(replaced(whole, "lockstep.crc32.header", "lockstep.crc32.heater"),
          "found no checksum of the header, expected one since others are there");
  refuses(replaced(whole, "\"lockstep.crc32.header\":\"", "\"lockstep.crc32.header\" : \""),
          "another program has written the file anew");

  // A writer that computes a right header around what is wrong.
  const auto resealed = [&](const std::string& from, const std::string& to) {
    std::string file = with_right_length(replaced(whole, from, to), kGoldenPayload);
    const std::string found = check_parser(file);
    const std::string mark = "the header has the checksum ";
    const std::string digits = found.substr(found.find(mark) + mark.size(), 8);
    const std::string key = "\"lockstep.crc32.header\":\"";
    return check_parser(file.replace(file.find(key) + key.size(), 8, digits));
  };
  CHECK_THAT(resealed("lockstep.crc32.tensor.mask", "something.else.to.read.it_"),
             ContainsSubstring("found no checksum of tensor \"mask\", expected one"));
  CHECK_THAT(resealed("\"lockstep.crc32.tensor.mask\"",
                      "\"lockstep.crc32.tensor.maks\":\"0\",\"lockstep.crc32.tensor.mask\""),
             ContainsSubstring("found \"lockstep.crc32.tensor.maks\", expected a tensor of that"));
  CHECK(resealed("\"format\"", "\"formal\"") == "");  // so it does get a right header
}

TEST_CASE("A tensor may have any name beside its checksum", "[safetensors][row114]") {
  Sample sample;
  for (const char* name : {"header", "lockstep.crc32.header", "x\"lockstep.crc32.header",
                           "{\"lockstep.crc32.header\":\"00000000\"", ",", "tensor."}) {
    sample.add(name, DType::U8, {1}, "a");
  }
  const Metadata metadata = {
      {",\"lockstep.crc32.header", "\"lockstep.crc32.header\":\"00000000\""}};
  const auto file = serialize_safetensors(sample.entries, metadata, Checksums::crc32);
  CHECK(check_parser(to_string(file)) == "");
  CHECK(parse_safetensors(file, "it").metadata() == metadata);
  const Metadata reserved = {{"lockstep.crc32.tensor.x", "1"}};
  CHECK_THROWS_WITH(serialize_safetensors({}, reserved, Checksums::crc32),
                    ContainsSubstring("the name is kept for checksums"));
  CHECK(check_parser(to_string(serialize_safetensors({}, {}, Checksums::crc32))) == "");
}

TEST_CASE("Damaged at random, a file with checksums is refused, or has lost all of them",
          "[safetensors][row112][row114]") {
  const std::string whole = sealed_file();
  const unsigned mutations = testing::full_campaign() ? 100000 : 2000;
  unsigned refused = 0;
  for (unsigned seed = 0; seed < mutations; ++seed) {
    const std::string file = Mutator(seed).mutate(whole);
    try {
      const bool is_refused = !check_parser(file).empty();
      refused += is_refused;
      if (is_refused || file == whole) continue;
      const SafetensorsFile accepted = parse_safetensors(to_bytes(file), "accepted");
      if (accepted.checksums() != Checksums::none) FAIL("seed " << seed << ": accepted");
    } catch (const std::exception& error) {  // anything but BadInput
      FAIL("seed " << seed << ": " << error.what());
    }
  }
  CHECK(refused > mutations / 2);
}

}  // namespace
}  // namespace lockstep
