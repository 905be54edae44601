#include "common/io/json.h"

#include <algorithm>
#include <set>
#include <vector>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/file.h"

namespace lockstep {

using nlohmann::json;

namespace {

/// Refuses what a JSON tree no longer shows (an object with the same key twice) or should never be
/// built from (nesting that no valid text has). A pass of its own: json::parse with a callback
/// looks through all siblings whenever an object ends, which is quadratic.
class KeyChecker final : public nlohmann::json_sax<json> {
 public:
  KeyChecker(const std::string& what, size_t deepest) : what_(what), deepest_(deepest) {}

  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    require(keys_.back().insert(name).second,
            "{} has the key {} twice, expected once; take another copy", what_, in_quotes(name));
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
    require(keys_.size() < deepest_,
            "{} nests deeper than {} objects and arrays; take another copy", what_, deepest_);
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& what_;
  size_t deepest_;
  std::vector<std::set<std::string>> keys_;  // the keys met so far in each open object
};

}  // namespace

json parse_json(std::string_view text) { return json::parse(text); }

json parse_strictly(std::string_view text, const std::string& what, size_t deepest) {
  // The parser would take it for the end of the text.
  const std::size_t zero = text.find('\0');
  require(zero == text.npos, "{} is not valid JSON: a zero byte at its byte {}; take another copy",
          what, zero);
  try {
    KeyChecker checker(what, deepest);
    json::sax_parse(text, &checker);
    return json::parse(text);
  } catch (const json::exception& error) {
    std::string_view reason = error.what();
    reason.remove_prefix(std::min(reason.find("] ") + 2, reason.size()));  // "[json.exception...] "
    fail<BadInput>("{} is not valid JSON: {}; take another copy", what, clipped(reason, 200));
  }
}

int64_t whole_number(const json& value, const std::string& what, int64_t low, int64_t high) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(INT64_MAX)) &&
                    value.get<int64_t>() >= low && value.get<int64_t>() <= high;
  if (fits) return value.get<int64_t>();
  const std::string shown = value.dump(-1, ' ', true, json::error_handler_t::replace);
  fail<BadInput>("{} is {}, expected a whole number from {} {}; take another copy", what,
                 clipped(shown, 60), low, high == INT64_MAX ? "on" : fmt::format("to {}", high));
}

std::string clipped(std::string_view text, std::size_t limit) {
  std::string shown(text.substr(0, limit));
  // A cut may leave half a character, and a parser may quote one.
  for (auto bad = find_invalid_utf8(shown); bad < shown.size(); bad = find_invalid_utf8(shown)) {
    shown[bad] = '?';
  }
  return text.size() > limit ? shown + "..." : shown;
}

std::string in_quotes(std::string_view text) { return json(clipped(text)).dump(); }

void write_json(const std::string& path, const json& value) {
  const std::string text = value.dump() + "\n";
  const std::span<const std::byte> piece = std::as_bytes(std::span(text));
  write_file_atomically(followed(path), std::span(&piece, 1));
}

}  // namespace lockstep
