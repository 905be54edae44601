#include "common/io/safetensors_header.h"

#include <algorithm>
#include <set>
#include <vector>

#include "common/core/error.h"
#include "common/core/utf8.h"
#include "common/io/safetensors_format.h"

namespace lockstep::safetensors {

using nlohmann::json;

namespace {

/// Users often try a file of torch.save(), in its new form or its old one.
void refuse_pickles(std::span<const std::byte> first, const std::string& what) {
  const std::string_view text(reinterpret_cast<const char*>(first.data()), first.size());
  require(!text.starts_with("PK\x03\x04") && !text.starts_with("\x80\x02"),
          "{}: found a file of torch.save(), expected safetensors; in Python: "
          "safetensors.torch.save_file(model.state_dict(), \"weights.safetensors\")",
          what);
}

}  // namespace

std::size_t header_length(std::span<const std::byte> first, std::uint64_t size,
                          const std::string& what) {
  std::uint64_t length = 0;
  std::copy_n(first.begin(), std::min(first.size(), kLengthBytes),
              reinterpret_cast<std::byte*>(&length));
  const std::uint64_t rest = size - std::min<std::uint64_t>(size, kLengthBytes);
  // A header of 640 bytes begins like a pickle: only a length that cannot be right is one.
  if (length > std::min<std::uint64_t>(rest, kMaxHeader)) refuse_pickles(first, what);
  require(size >= kLengthBytes,
          "{}: found {} bytes, expected at least 8 (the length of the header); the file is "
          "truncated or not a safetensors file",
          what, size);
  require(length <= kMaxHeader,
          "{}: the header claims {} bytes, expected at most {}; probably not a safetensors file",
          what, length, kMaxHeader);
  require(length <= rest,
          "{}: the header claims {} bytes, but only {} follow; the file is truncated, get it again",
          what, length, rest);
  return length;
}

std::string_view header_text(std::span<const std::byte> header, const std::string& what) {
  const std::string_view text(reinterpret_cast<const char*>(header.data()) + kLengthBytes,
                              header.size() - kLengthBytes);
  const std::size_t invalid = find_invalid_utf8(text);
  require(invalid == text.size(),
          "{}: the header is not valid UTF-8 at its byte {} of {}; the file is damaged", what,
          invalid, text.size());
  return text;
}

namespace {

/// Refuses what a JSON tree no longer shows (an object with the same key twice) or should never be
/// built from (nesting that no valid header has). A pass of its own: json::parse with a callback
/// looks through all siblings whenever an object ends, which is quadratic.
class KeyChecker final : public nlohmann::json_sax<json> {
 public:
  explicit KeyChecker(const std::string& what) : what_(what) {}

  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    require(keys_.back().insert(name).second, "{}: the header has the key {} twice, expected once",
            what_, in_quotes(name));
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override {
    return false;  // json::parse will say it
  }

 private:
  bool open() {
    require(keys_.size() < 3, "{}: the header nests deeper than {{name: {{shape: [...]}}}}", what_);
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& what_;
  std::vector<std::set<std::string>> keys_;  // the keys met so far in each open object
};

}  // namespace

json parse_header(std::string_view text, const std::string& what) {
  // The parser would skip a byte order mark and would take a zero byte for the end of the text.
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  require(first != text.npos && text[first] == '{',
          "{}: the header is not a JSON object: found {}, expected '{{'", what,
          first == text.npos ? "no text" : in_quotes(clipped(text.substr(first), 10)));
  const std::size_t zero = text.find('\0');
  require(zero == text.npos, "{}: the header is not valid JSON: a zero byte at its byte {}", what,
          zero);
  try {
    KeyChecker checker(what);
    json::sax_parse(text, &checker);
    return json::parse(text);
  } catch (const json::exception& error) {
    std::string_view reason = error.what();
    reason.remove_prefix(std::min(reason.find("] ") + 2, reason.size()));  // "[json.exception...] "
    fail<BadInput>("{}: the header is not valid JSON: {}", what, clipped(reason, 200));
  }
}

}  // namespace lockstep::safetensors
