// safetensors: the format, in memory and on the disk, and its checksums. How files are saved:
// file_test.cpp.

#include <fmt/ranges.h>

#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "common/core/text.h"
#include "common/io/json.h"
#include "common/io/safetensors_header.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/mutator.h"
#include "tests/support/process.h"
#include "tests/support/safetensors_support.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using namespace lockstep::testing::io;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using testing::message_of;
using testing::TempDir;
using namespace std::string_literals;  // "...\0..."s keeps its zero bytes

// --- Samples -------------------------------------------------------------------------------------

/// Tensors together with the bytes that their entries view.
class Sample {
 public:
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
           const std::string& bytes) {
    storage_.push_back(std::make_unique<std::vector<std::byte>>(to_bytes(bytes)));
    entries.push_back({name, dtype, std::move(shape), *storage_.back()});
  }

  std::vector<TensorEntry> entries;

 private:
  std::vector<std::unique_ptr<std::vector<std::byte>>> storage_;
};

/// Every case for which the format has a rule: a scalar, an empty tensor, NaN and -0, I64 and BOOL,
/// names that are empty, non-ASCII, or need escapes. In an order that the writer must change.
Sample golden_tensors() {
  Sample sample;
  sample.add("pixels", DType::U8, {1, 1}, "\xFF");
  sample.add("a\"b\\c\n\x01/", DType::F16, {2}, "\x01\x3C\x02\x3C");
  sample.add("mask", DType::BOOL, {3}, "\x01\x00\x01"s);
  sample.add("weight", DType::F64, {2}, "\0\0\0\0\0\0\xF8\x3F\0\0\0\0\0\0\0\xC0"s);
  sample.add("empty", DType::F32, {0, 4}, "");
  sample.add("", DType::I8, {1}, "\x80");
  sample.add("bias", DType::F32, {1, 3}, "\0\0\x80\x3F\0\0\xC0\x7F\0\0\0\x80"s);
  sample.add("gr\u00F6\u00DFe.\u91CD", DType::BF16, {1}, "\x80\x3F");
  sample.add("steps", DType::I64, {}, "\xF9\xFF\xFF\xFF\xFF\xFF\xFF\xFF");
  return sample;
}

/// The output of the reference implementation (Python package safetensors 0.8.0, `serialize`) for
/// the same tensors and the metadata {"format": "pt ✓<tab>"}, byte for byte.
std::string golden_file() {
  const std::string header =
      R"({"__metadata__":{"format":"pt ✓\t"},)"
      R"("steps":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("weight":{"dtype":"F64","shape":[2],"data_offsets":[8,24]},)"
      R"("bias":{"dtype":"F32","shape":[1,3],"data_offsets":[24,36]},)"
      R"("empty":{"dtype":"F32","shape":[0,4],"data_offsets":[36,36]},)"
      R"("größe.重":{"dtype":"BF16","shape":[1],"data_offsets":[36,38]},)"
      R"("a\"b\\c\n\u0001/":{"dtype":"F16","shape":[2],"data_offsets":[38,42]},)"
      R"("":{"dtype":"I8","shape":[1],"data_offsets":[42,43]},)"
      R"("pixels":{"dtype":"U8","shape":[1,1],"data_offsets":[43,44]},)"
      R"("mask":{"dtype":"BOOL","shape":[3],"data_offsets":[44,47]}} )";
  const std::string payload =
      "\xF9\xFF\xFF\xFF\xFF\xFF\xFF\xFF"                // steps
      "\0\0\0\0\0\0\xF8\x3F\0\0\0\0\0\0\0\xC0"          // weight
      "\0\0\x80\x3F\0\0\xC0\x7F\0\0\0\x80"              // bias
      "\x80\x3F\x01\x3C\x02\x3C\x80\xFF\x01\x00\x01"s;  // the small ones
  return "\x48\x02\0\0\0\0\0\0"s + header + payload;
}

Metadata golden_metadata() { return {{"format", "pt \u2713\t"}}; }

/// The golden tensors with checksums.
std::string sealed_file() {
  const Sample sample = golden_tensors();
  return to_string(serialize_safetensors(sample.entries, golden_metadata(), Checksums::crc32));
}

/// One tensor of every type, with random bytes (among them every kind of NaN) and shapes.
Sample random_tensors(std::mt19937& random) {
  Sample sample;
  for (int i = 0; i <= static_cast<int>(DType::U64); ++i) {
    const auto dtype = static_cast<DType>(i);
    std::vector<std::int64_t> shape(random() % 4);
    for (auto& dimension : shape) dimension = random() % 4;
    std::string bytes(safetensors::tensor_bytes(shape, dtype).value(), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    sample.add(fmt::format("layer{}.{}", random() % 100, dtype_name(dtype)), dtype, shape, bytes);
  }
  return sample;
}

/// A header with one entry, and the text of the error that it and `payload` cause.
std::string entry_header(const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
  return fmt::format(R"({{"w":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", dtype, shape,
                     offsets);
}

std::string why_not(const std::string& header, const std::string& payload = "") {
  return check_parser(file_of(header, payload));
}

constexpr const char* kOne = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
constexpr const char* kTwo = R"({"dtype":"U8","shape":[1],"data_offsets":[1,2]})";

/// What a command prints.
std::string output_of(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  std::string output;
  std::array<char, 4096> buffer;
  while (const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), n);
  }
  return ::pclose(pipe) == 0 ? output : "the reader failed: " + output;
}

// --- Writing and reading back ------------------------------------------------------------------

TEST_CASE("The writer produces the reference implementation's bytes", "[safetensors][row106]") {
  const Sample sample = golden_tensors();
  const auto file = serialize_safetensors(sample.entries, golden_metadata());
  CHECK(to_string(file) == golden_file());
  CHECK(to_string(serialize_safetensors({})) == file_of("{}      "));
}

TEST_CASE("The reader understands the reference implementation's file", "[safetensors][row106]") {
  const SafetensorsFile file = parse_safetensors(to_bytes(golden_file()), "golden");
  CHECK(file.metadata() == golden_metadata());
  const Sample sample = golden_tensors();
  REQUIRE(file.tensors().size() == sample.entries.size());
  for (const TensorEntry& expected : sample.entries) {
    INFO("tensor " << expected.name);
    CHECK(has_tensor(file, expected));
  }
  CHECK(file.tensors().front().name == "steps");
  CHECK(file.tensors().back().name == "mask");
}

TEST_CASE("Saving and loading gives every bit back, whatever the type", "[safetensors][row106]") {
  const TempDir directory;
  std::mt19937 random(106);
  for (int round = 0; round < 20; ++round) {
    const Sample sample = random_tensors(random);
    const Metadata metadata = {{"round", std::to_string(round)}, {"", "\u00E9\n\"\\\x7F"}};
    save_safetensors(directory / "model.safetensors", sample.entries, metadata);
    const SafetensorsFile loaded = load_safetensors(directory / "model.safetensors");

    CHECK(loaded.metadata() == metadata);
    REQUIRE(loaded.tensors().size() == sample.entries.size());
    for (const TensorEntry& expected : sample.entries) CHECK(has_tensor(loaded, expected));
    const auto again = serialize_safetensors(loaded.tensors(), loaded.metadata());
    CHECK(to_string(again) == testing::read_text(directory / "model.safetensors"));
  }
}

TEST_CASE("A moved file keeps its tensors' bytes", "[safetensors]") {
  SafetensorsFile first = parse_safetensors(to_bytes(golden_file()), "golden");
  const SafetensorsFile second = std::move(first);
  CHECK(to_string(serialize_safetensors(second.tensors(), second.metadata())) == golden_file());
}

// --- Another reader ----------------------------------------------------------------------------

// Written from the format's description alone; it shares nothing with our reader.
constexpr const char* kPythonReader = R"PY(
import json, struct, sys
data = open(sys.argv[1], 'rb').read()
(n,) = struct.unpack('<Q', data[:8])
text = data[8:8 + n].decode('utf-8')
assert text[0] == '{' and (8 + n) % 8 == 0 and text.rstrip(' ')[-1] == '}'
header, payload = json.loads(text), data[8 + n:]
result, end = {'metadata': header.pop('__metadata__', {}), 'tensors': {}}, 0
size = {'U8': 1, 'I8': 1, 'BOOL': 1, 'F16': 2, 'BF16': 2, 'I16': 2, 'F32': 4, 'F64': 8, 'I64': 8}
for name, t in header.items():
    begin, stop = t['data_offsets']
    count = 1
    for d in t['shape']: count *= d
    assert begin == end and stop - begin == count * size[t['dtype']] and begin % size[t['dtype']] == 0
    result['tensors'][name] = [t['dtype'], t['shape'], payload[begin:stop].hex()]
    end = stop
assert end == len(payload)
print(json.dumps(result))
)PY";

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

TEST_CASE("An independent reader finds the same tensors in our file", "[safetensors][row106]") {
  const TempDir directory;
  const Sample sample = golden_tensors();
  save_safetensors(directory / "model.safetensors", sample.entries, golden_metadata());
  testing::write_file(directory / "reader.py", kPythonReader);

  const std::string output = output_of(fmt::format(
      "python3 '{0}/reader.py' '{0}/model.safetensors' 2>&1", directory.path().string()));
  INFO(output);
  REQUIRE(json::accept(output));
  json expected = {{"metadata", golden_metadata()}};
  for (const TensorEntry& tensor : sample.entries) {
    expected["tensors"][tensor.name] =
        json::array({dtype_name(tensor.dtype), tensor.shape, hex(tensor.bytes)});
  }
  CHECK(json::parse(output) == expected);
}

// --- What the reader refuses -------------------------------------------------------------------

TEST_CASE("Each malformed header has an error of its own", "[safetensors][row112]") {
  SECTION("0 to 7 bytes") {
    for (std::size_t size = 0; size < 8; ++size) {
      CHECK_THAT(check_parser(std::string(size, '\0')),
                 ContainsSubstring(fmt::format("found {} bytes, expected at least 8", size)));
    }
  }
  SECTION("a length of 2^63") {
    CHECK_THAT(check_parser("\0\0\0\0\0\0\0\x80{}"s),
               ContainsSubstring("claims 9223372036854775808 bytes, expected at most 100000000"));
  }
  SECTION("a length beyond the file") {
    CHECK_THAT(check_parser("\x03\0\0\0\0\0\0\0{}"s),
               ContainsSubstring("claims 3 bytes, but only 2 follow"));
  }
  SECTION("a length above 100 MB, even if the file had it") {
    CHECK_THAT(check_parser("\x01\xE1\xF5\x05\0\0\0\0{}"s),
               ContainsSubstring("claims 100000001 bytes, expected at most 100000000"));
    CHECK_THAT(check_parser("\x00\xE1\xF5\x05\0\0\0\0{}"s),
               ContainsSubstring("claims 100000000 bytes, but only 2 follow"));
  }
  SECTION("bad UTF-8") {
    CHECK_THAT(why_not("{\"\xC3\x28\":1}"), ContainsSubstring("not valid UTF-8 at its byte 2"));
  }
  SECTION("not JSON") {
    CHECK_THAT(why_not("{"), ContainsSubstring("not valid JSON"));
    CHECK_THAT(why_not("{} x"), ContainsSubstring("not valid JSON"));
    CHECK_THAT(why_not(""), ContainsSubstring("not a JSON object: found no text"));
    CHECK_THAT(why_not("[]"), ContainsSubstring("not a JSON object: found \"[]\""));
  }
  SECTION("a hole") {
    CHECK_THAT(why_not(entry_header("\"U8\"", "[1]", "[1,2]"), "ab"),
               ContainsSubstring("tensor \"w\": begins at byte 1, expected 0: a hole"));
    CHECK_THAT(
        why_not(fmt::format(R"({{"a":{},"b":{{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}}})",
                            kOne),
                "abc"),
        ContainsSubstring("tensor \"b\": begins at byte 2, expected 1: a hole"));
  }
  SECTION("overlap") {
    CHECK_THAT(why_not(fmt::format(R"({{"a":{},"b":{}}})", kOne, kOne), "a"),
               ContainsSubstring("tensor \"b\": begins at byte 0, expected 1: overlap"));
  }
  SECTION("a size that does not match the shape") {
    CHECK_THAT(why_not(entry_header("\"F32\"", "[2,2]", "[0,4]"), "abcd"),
               ContainsSubstring("tensor \"w\": 4 bytes, expected 16 for shape [2, 2] of F32"));
  }
  SECTION("a shape that overflows") {
    for (const char* shape : {"[2,18446744073709551614]", "[2,9223372036854775807]",
                              "[4294967296,4294967296]", "[9223372036854775807,4,0]"}) {
      CHECK_THAT(why_not(entry_header("\"I32\"", shape, "[0,16]"), std::string(16, '\0')),
                 ContainsSubstring("overflow"));
    }
    CHECK_THAT(why_not(entry_header("\"U8\"", "[0,9223372036854775808]", "[0,0]")),
               ContainsSubstring("shape holds 9223372036854775808: overflow"));
  }
  SECTION("a trailing byte") {
    CHECK_THAT(why_not(entry_header("\"U8\"", "[1]", "[0,1]"), "ab"),
               ContainsSubstring("found 2 bytes after the header, expected 1: 1 trailing bytes"));
    CHECK_THAT(why_not("{}", "a"), ContainsSubstring("1 trailing bytes"));
  }
  SECTION("a duplicate key, at every level") {
    CHECK_THAT(why_not(fmt::format(R"({{"a":{},"b":{},"a":{}}})", kOne, kTwo, kOne), "ab"),
               ContainsSubstring("the key \"a\" twice"));
    CHECK_THAT(why_not(fmt::format(R"({{"a":{},"\u0061":{}}})", kOne, kTwo), "ab"),
               ContainsSubstring("the key \"a\" twice"));
    CHECK_THAT(why_not(R"({"w":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", "a"),
               ContainsSubstring("the key \"shape\" twice"));
    CHECK_THAT(why_not(R"({"__metadata__":{"k":"1","k":"2"}})"),
               ContainsSubstring("the key \"k\" twice"));
    CHECK_THAT(why_not(R"({"__metadata__":{},"__metadata__":{}})"),
               ContainsSubstring("the key \"__metadata__\" twice"));
  }
  SECTION("metadata that is not text") {
    CHECK_THAT(why_not(R"({"__metadata__":{"epoch":3}})"),
               ContainsSubstring("__metadata__ \"epoch\" is 3, expected a string"));
    CHECK_THAT(why_not(R"({"__metadata__":"pt"})"),
               ContainsSubstring("__metadata__ is \"pt\", expected an object"));
    CHECK_THAT(why_not(R"({"__metadata__":null})"), ContainsSubstring("expected an object"));
  }
}

TEST_CASE("An entry that is not exactly as the format says is refused", "[safetensors][row112]") {
  const auto expect = [](const std::string& header, const std::string& text) {
    INFO(header);
    CHECK_THAT(why_not(header, "abcd"), ContainsSubstring(text));
  };
  expect(R"({"w":["U8",[4],[0,4]]})", "expected an object");
  expect(R"({"w":{"dtype":"U8","shape":[4]}})", "tensor \"w\": it has no data_offsets");
  expect(R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"strides":[1]}})",
         "has the unknown field \"strides\"");
  expect(entry_header("\"f32\"", "[1]", "[0,4]"), "dtype \"f32\" is unknown");
  expect(entry_header("\"F4\"", "[8]", "[0,4]"), "dtype F4 packs several elements into a byte");
  expect(entry_header("7", "[1]", "[0,4]"), "dtype is 7, expected a string");
  expect(entry_header("\"U8\"", "4", "[0,4]"), "shape is 4, expected an array");
  expect(entry_header("\"U8\"", "[-4]", "[0,4]"), "shape holds -4, expected a whole number");
  expect(entry_header("\"U8\"", "[4.0]", "[0,4]"), "shape holds 4.0, expected a whole number");
  expect(entry_header("\"U8\"", "[\"4\"]", "[0,4]"), "shape holds \"4\", expected a whole number");
  expect(entry_header("\"U8\"", "[-0]", "[0,0]"), "expected a whole number");
  expect(entry_header("\"U8\"", "[4]", "[0,4,4]"),
         "data_offsets is [0,4,4], expected [begin, end]");
  expect(entry_header("\"U8\"", "[4]", "[0,-4]"), "data_offsets holds -4");
  expect(entry_header("\"U8\"", "[4]", "[0,18446744073709551616]"), "data_offsets holds 1.84467");
  expect(entry_header("\"U8\"", "[4]", "[0,1e999]"), "not valid JSON");
  expect(entry_header("\"U8\"", "[0]", "[0,18446744073709551615]"),
         "tensor \"w\": 18446744073709551615 bytes, expected 0");
  expect(R"({"e":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
         R"("w":{"dtype":"U8","shape":[0],"data_offsets":[0,-0]}})",
         "expected a whole number");
  expect(entry_header("\"U8\"", "[[4]]", "[0,4]"), "nests deeper");
  expect("{\"w\":" + std::string(100'000, '['), "nests deeper");
  expect(fmt::format(R"({{"a":{},"b":{{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}}})", kOne),
         "tensor \"b\": ends at byte 0, before it begins");
}

TEST_CASE("A header of 60,000 tensors is read like a short one", "[safetensors][row112]") {
  constexpr int kTensors = 60'000;
  std::string header;
  for (int i = 0; i < kTensors; ++i) {
    header += fmt::format(R"({}"w{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                          i == 0 ? "{" : ",", i);
  }
  // A reader that looked through all entries at each of them would take a minute and more.
  const auto begin = lockstep::testing::Clock::now();
  const auto file = parse_safetensors(to_bytes(file_of(header + "}")), "many");
  CHECK(lockstep::testing::seconds_since(begin) < 30);
  CHECK(file.tensors().size() == kTensors);
}

TEST_CASE("Bytes that a JSON parser may overlook are refused", "[safetensors][row112]") {
  CHECK_THAT(why_not("{}\0\0 hidden"s), ContainsSubstring("a zero byte at its byte 2"));
  CHECK_THAT(why_not("\xEF\xBB\xBF{}"), ContainsSubstring("not a JSON object"));
  CHECK_THAT(why_not(R"({"\ud800":1})"), ContainsSubstring("not valid JSON"));
  CHECK_THAT(why_not("{\"a\n\":1}"), ContainsSubstring("not valid JSON"));
  CHECK_THAT(why_not("{/* comment */}"), ContainsSubstring("not valid JSON"));
  CHECK_THAT(why_not("{\u00F6}"),
             ContainsSubstring("not valid JSON"));  // error quotes half of it
}

TEST_CASE("White space around the header, other orders and empty tensors are accepted",
          "[safetensors]") {
  CHECK(why_not("\t\n{}\r ") == "");
  CHECK(why_not(fmt::format(R"( {{ "b" : {}, "a" : {} }} )", kTwo, kOne), "ab") == "");
  const std::string empties = R"({"z":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},"a":)" +
                              std::string(kOne) +
                              R"(,"b":{"dtype":"F64","shape":[3,0],"data_offsets":[0,0]}})";
  CHECK(why_not(empties, "x") == "");
  const SafetensorsFile file = parse_safetensors(to_bytes(file_of(empties, "x")), "empties");
  CHECK(file.tensors()[0].name == "b");
  CHECK(file.tensors()[1].name == "a");
  CHECK(file.tensors()[2].name == "z");
}

TEST_CASE("A file cut off at any byte is refused", "[safetensors][row113]") {
  const TempDir directory;
  const std::string whole = golden_file();
  REQUIRE(check_parser(whole) == "");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    INFO("cut to " << size << " of " << whole.size() << " bytes");
    testing::write_file(directory / "cut.safetensors", whole.substr(0, size));
    CHECK_THROWS_AS(load_safetensors(directory / "cut.safetensors"), BadInput);
    CHECK_THAT(check_parser(whole.substr(0, size)), ContainsSubstring("truncated"));
  }
}

TEST_CASE("An error names the file and stays short and on one line", "[safetensors]") {
  const TempDir directory;
  testing::write_file(directory / "bad.safetensors", file_of("[1]"));
  CHECK_THROWS_WITH(load_safetensors(directory / "bad.safetensors"),
                    Catch::Matchers::StartsWith((directory / "bad.safetensors").string() + ": "));
  const std::string name = std::string(1000, 'n') + "\\n";
  CHECK_THAT(why_not("{\"" + name + "\":3}"), ContainsSubstring("nnn...\": found 3"));
  CHECK_THAT(why_not(R"({"a\nb\u2028":3})"), ContainsSubstring("tensor \"a\\nb"));
}

// --- What the writer refuses -------------------------------------------------------------------

TEST_CASE("The writer refuses what no reader could read", "[safetensors]") {
  const auto refuses = [](const Sample& sample, const std::string& text) {
    CHECK_THROWS_WITH(serialize_safetensors(sample.entries), ContainsSubstring(text));
    CHECK_THROWS_AS(serialize_safetensors(sample.entries), BadInput);
  };
  Sample sample;
  SECTION("two tensors of one name") {
    sample.add("w", DType::F32, {}, "abcd");
    sample.add("w", DType::U8, {1}, "a");
    refuses(sample, "two tensors of one name: \"w\"");
  }
  SECTION("the reserved name") {
    sample.add("__metadata__", DType::U8, {1}, "a");
    refuses(sample, "the name is reserved");
  }
  SECTION("a name that is not UTF-8") {
    sample.add("caf\xE9", DType::U8, {1}, "a");
    refuses(sample, "not valid UTF-8");
  }
  SECTION("bytes that do not fit the shape") {
    sample.add("w", DType::F32, {2}, "abcd");
    refuses(sample, "found 4 bytes, expected [2]F32");
  }
  SECTION("a negative dimension") {
    sample.add("w", DType::F32, {-1, -1}, "abcd");
    refuses(sample, "negative dimension");
  }
  SECTION("metadata that is not UTF-8") {
    CHECK_THROWS_AS(serialize_safetensors({}, {{"k", "\xFF"}}), BadInput);
  }
}

TEST_CASE("Element types have the names and sizes of the format", "[safetensors]") {
  const std::map<std::size_t, std::vector<std::string>> names_by_size = {
      {1, {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}},
      {2, {"I16", "U16", "F16", "BF16"}},
      {4, {"I32", "U32", "F32"}},
      {8, {"C64", "F64", "I64", "U64"}}};
  int place = 0;  // the writer's order: by size, within it as in the reference implementation
  for (const auto& [size, names] : names_by_size) {
    for (const std::string& name : names) {
      const auto dtype = static_cast<DType>(place++);
      CHECK(dtype_name(dtype) == name);
      CHECK(dtype_size(dtype) == size);
      CHECK(dtype_from_name(name) == dtype);
    }
  }
  CHECK_FALSE(dtype_from_name("f32").has_value());
  CHECK_FALSE(dtype_from_name("").has_value());
}

// --- Tensor by tensor, from the disk -------------------------------------------------------------

/// Reads every tensor of a file.
void read_all(const std::filesystem::path& path) {
  const SafetensorsStream stream(path);
  for (const StoredTensor& tensor : stream.tensors()) stream.read(tensor);
}

/// The text of the BadInput that a file causes, read at once and tensor by tensor; "" for none.
std::string refusal_of(const std::filesystem::path& path) {
  const std::string in_memory = message_of<BadInput>([&] { load_safetensors(path); });
  CHECK(message_of<BadInput>([&] { read_all(path); }) == in_memory);
  return in_memory == "nothing was thrown" ? "" : in_memory;
}

TEST_CASE("A file read tensor by tensor has what it has when it is read at once",
          "[safetensors][row106]") {
  const TempDir directory;
  for (const std::string& bytes : {golden_file(), sealed_file()}) {
    testing::write_file(directory / "file", bytes);
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
  const TempDir directory;
  testing::write_file(directory / "file", golden_file());
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
    CHECK_THAT(message_of<BadInput>([&] { stream.read(weight, first, bytes); }),
               ContainsSubstring("tensor \"weight\" has 16 bytes, expected 8 from element"));
  }
}

TEST_CASE("What is refused in memory is refused on the disk, and in the same words",
          "[safetensors][row114]") {
  const TempDir directory;
  const std::string whole = sealed_file();
  std::vector<std::string> broken{"", "short", "PK\x03\x04 a pickle", whole + "x"};
  for (size_t cut = 1; cut < whole.size(); cut += 7) broken.push_back(whole.substr(0, cut));
  for (size_t byte = 0; byte < whole.size(); byte += 3) {
    broken.push_back(whole);
    broken.back()[byte] ^= 4;
  }
  for (const std::string& bytes : broken) {
    testing::write_file(directory / "file", bytes);
    CHECK(!refusal_of(directory / "file").empty());
  }
}

TEST_CASE("A header of 640 bytes is none of torch.save()'s files, which begin alike",
          "[safetensors]") {
  const TempDir directory;
  const auto refusal = [&](const std::string& bytes) {
    testing::write_file(directory / "file", bytes);
    return refusal_of(directory / "file");
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
  const TempDir directory;
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
    testing::write_file(directory / "file", bytes);
    CHECK_THAT(
        refusal_of(directory / "file"),
        ContainsSubstring((directory / "file").string() + ": ") && ContainsSubstring(expected));
  }
}

// --- Checksums -----------------------------------------------------------------------------------

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

  const TempDir directory;
  const Sample sample = golden_tensors();
  const auto save = [&](Checksums checksums) {
    return save_safetensors(directory / "file", sample.entries, golden_metadata(), checksums);
  };
  CHECK(save(Checksums::crc32) == file.header_checksum());
  CHECK(testing::read_text(directory / "file") == sealed_file());
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
  const TempDir directory;
  testing::write_file(directory / "sealed", sealed_file());
  testing::write_file(directory / "check.py", kPythonChecksums);
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

// --- Anything at all ---------------------------------------------------------------------------

TEST_CASE("Damaged at random, a file is read consistently or refused in one line",
          "[safetensors][row112]") {
  const std::string whole = golden_file();
  int accepted = 0;
  std::set<std::string> not_yet = {
      "at least 8",        "at most 100000000", "but only",     "UTF-8",
      "not a JSON object", "valid JSON",        "twice",        "nests",
      "unknown",           "expected a string", "whole number", "a hole",
      "overlap",           "before it",         "overflow",     "for shape",
      "truncated",         "trailing",          "has no",       "expected an object"};
  const unsigned mutations = testing::full_campaign() ? 100000 : 4000;
  for (unsigned seed = 0; seed < mutations; ++seed) {
    std::string outcome;
    try {
      outcome = check_parser(Mutator(seed).mutate(whole));
    } catch (const std::exception& error) {  // anything but BadInput
      FAIL("seed " << seed << ": " << error.what());
    }
    accepted += outcome.empty();
    std::erase_if(not_yet,
                  [&](const std::string& text) { return outcome.find(text) != outcome.npos; });
  }
  CHECK(accepted > 100);  // the payload and names may change freely
  INFO("errors that no mutation reached: " << fmt::format("{}", fmt::join(not_yet, "; ")));
  CHECK(not_yet.empty());
}

}  // namespace
}  // namespace lockstep
