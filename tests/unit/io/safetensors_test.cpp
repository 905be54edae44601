// The safetensors reader and writer: the format itself. Files on a disk: file_test.cpp.

#include <fmt/ranges.h>

#include <array>
#include <cstdio>
#include <map>
#include <random>
#include <set>

#include "common/core/utf8.h"
#include "common/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/mutator.h"
#include "tests/support/safetensors_support.h"
#include "tests/support/tasks.h"
#include "tests/unit/io/safetensors_samples.h"

namespace lockstep {
namespace {

using namespace testing::samples;
using namespace lockstep::testing::io;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using namespace std::string_literals;  // "...\0..."s keeps its zero bytes

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
    const TensorEntry* found = file.find(expected.name);
    REQUIRE(found != nullptr);
    CHECK(same_tensor(*found, expected));
  }
  CHECK(file.tensors().front().name == "steps");
  CHECK(file.tensors().back().name == "mask");
  CHECK(file.find("missing") == nullptr);
}

TEST_CASE("Saving and loading gives every bit back, whatever the type", "[safetensors][row106]") {
  const ScratchDirectory directory;
  std::mt19937 random(106);
  for (int round = 0; round < 20; ++round) {
    const Sample sample = random_tensors(random);
    const Metadata metadata = {{"round", std::to_string(round)}, {"", "\u00E9\n\"\\\x7F"}};
    save_safetensors(directory / "model.safetensors", sample.entries, metadata);
    const SafetensorsFile loaded = load_safetensors(directory / "model.safetensors");

    CHECK(loaded.metadata() == metadata);
    REQUIRE(loaded.tensors().size() == sample.entries.size());
    for (const TensorEntry& expected : sample.entries) {
      const TensorEntry* found = loaded.find(expected.name);
      REQUIRE(found != nullptr);
      CHECK(same_tensor(*found, expected));
    }
    const auto again = serialize_safetensors(loaded.tensors(), loaded.metadata());
    CHECK(to_string(again) == read_text(directory / "model.safetensors"));
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
  const ScratchDirectory directory;
  const Sample sample = golden_tensors();
  save_safetensors(directory / "model.safetensors", sample.entries, golden_metadata());
  write_text(directory / "reader.py", kPythonReader);

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
}

TEST_CASE("A tensor that ends before it begins is refused", "[safetensors][row112]") {
  const std::string header =
      fmt::format(R"({{"a":{},"b":{{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}}})", kOne);
  CHECK_THAT(why_not(header, "a"),
             ContainsSubstring("tensor \"b\": ends at byte 0, before it begins"));
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
  const ScratchDirectory directory;
  const std::string whole = golden_file();
  REQUIRE(check_parser(whole) == "");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    INFO("cut to " << size << " of " << whole.size() << " bytes");
    write_text(directory / "cut.safetensors", whole.substr(0, size));
    CHECK_THROWS_AS(load_safetensors(directory / "cut.safetensors"), BadInput);
    CHECK_THAT(check_parser(whole.substr(0, size)), ContainsSubstring("truncated"));
  }
}

TEST_CASE("An error names the file and stays short and on one line", "[safetensors]") {
  const ScratchDirectory directory;
  write_text(directory / "bad.safetensors", file_of("[1]"));
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

TEST_CASE("UTF-8 is checked as RFC 3629 defines it", "[safetensors]") {
  for (const char* text : {"", "a", "\u00E9", "\u0800", "\uD7FF", "\uE000", "\uFFFF", "\U00010000",
                           "\U0010FFFF", "\x7F"}) {
    CHECK(is_valid_utf8(text));
  }
  for (const char* text :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3\x28", "\xE0\x9F\xBF", "\xED\xA0\x80",
        "\xE2\x82", "\xE2\x28\xA1", "\xE2\x82\x28", "\xF0\x90\x80\x28", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF0\x90\x80", "\xF5\x80\x80\x80", "\xFF"}) {
    INFO(text);
    CHECK(find_invalid_utf8("ok \u00E9"s + text) == 5);
  }
  const std::string_view euro = "\u20AC";
  CHECK(find_invalid_utf8(euro.substr(0, 2)) == 0);  // the view ends, the memory goes on
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
