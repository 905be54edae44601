#include "06-fully-sharded/shard_texts.h"

#include <algorithm>
#include <limits>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr int64_t kFormatVersion = 1;
constexpr const char* kVersion = "format_version";
constexpr int kMostWorld = std::numeric_limits<int>::max();
constexpr const char* kAdvice = "take another checkpoint";

/// The fields of a JSON object, each of which is taken once.
class Fields {
 public:
  Fields(const std::string& text, const std::string& file)
      : what_(file + ": its description of shards"), fields_(parse_strictly(text, what_, 3)) {
    require(fields_.is_object(), "{} is no JSON object; {}", what_, kAdvice);
    const int64_t version = take_number(kVersion, 0);
    require(version == kFormatVersion,
            "{}: sharded format version {}, expected {}; resume with the Lockstep that wrote it",
            file, version, kFormatVersion);
  }

  bool has(const std::string& name) const { return fields_.contains(name); }
  json take(const std::string& name) {
    const auto found = fields_.find(name);
    require(found != fields_.end(), "{} has no {}, expected one; {}", what_, name, kAdvice);
    json value = std::move(*found);
    fields_.erase(found);
    return value;
  }
  int64_t take_number(const std::string& name, int64_t low, int64_t high = INT64_MAX) {
    return whole_number(take(name), of(name), low, high);
  }
  json take_object(const std::string& name) {
    json object = take(name);
    require(object.is_object(), "{} is no JSON object; {}", of(name), kAdvice);
    return object;
  }
  std::vector<std::string> take_texts(const std::string& name) {
    const json array = take(name);
    const bool texts =
        array.is_array() && !array.empty() &&
        std::ranges::all_of(array, [](const json& each) { return each.is_string(); });
    require(texts, "{} is not an array of texts; {}", of(name), kAdvice);
    return array.get<std::vector<std::string>>();
  }
  void require_no_others() const {
    if (fields_.empty()) return;
    fail<BadInput>("{} has {}, which format version {} does not know; {}", what_,
                   shortened(fields_.begin().key()), kFormatVersion, kAdvice);
  }

  /// A field, or a part of one, for errors.
  std::string of(const std::string& name) const { return what_ + ": " + shortened(name); }

 private:
  std::string what_;
  json fields_;
};

/// The shape of a parameter: of no network's are there more than four extents, or one of 0.
Shape shape_of(const json& extents, const std::string& what) {
  require(extents.is_array() && extents.size() <= 4, "{} is no shape of up to 4 extents; {}", what,
          kAdvice);
  std::vector<int64_t> numbers;
  for (const json& each : extents) numbers.push_back(whole_number(each, what, 1, INT64_MAX));
  Shape shape(numbers);
  within(what, [&] { shape.bytes(sizeof(Real)); });
  return shape;
}

}  // namespace

std::string ShardText::to_json() const {
  return json{{kVersion, kFormatVersion},
              {"steps", place.steps},
              {"rank", place.rank},
              {"world_size", place.world_size},
              {"first", first}}
      .dump();
}

ShardText ShardText::from_json(const std::string& text, const std::string& what) {
  Fields fields(text, what);
  ShardText shard;
  shard.place.steps = fields.take_number("steps", 0);
  const int64_t world_size = fields.take_number("world_size", 1, kMostWorld);
  shard.place.world_size = static_cast<int>(world_size);
  shard.place.rank = static_cast<int>(fields.take_number("rank", 0, world_size - 1));
  const json first = fields.take_object("first");
  for (const auto& [name, element] : first.items()) {
    shard.first[name] = whole_number(element, fields.of("first " + name), 0, INT64_MAX);
  }
  fields.require_no_others();
  return shard;
}

std::string ShardIndex::to_json() const {
  json shapes = json::object();
  for (const StateTensor& parameter : parameters) {
    shapes[parameter.name] = parameter.shape.extents();
  }
  return json{{kVersion, kFormatVersion},
              {"checksums", checksums},
              {"states", states},
              {"parameters", shapes},
              {kStep, std::map<std::string, int64_t>(steps.begin(), steps.end())}}
      .dump();
}

ShardIndex ShardIndex::from_json(const std::string& text, const std::string& what) {
  Fields fields(text, what);
  ShardIndex index{.checksums = fields.take_texts("checksums"),
                   .states = fields.take_texts("states")};
  const json parameters = fields.take_object("parameters");
  for (const auto& [name, shape] : parameters.items()) {
    index.parameters.push_back({.name = name, .shape = shape_of(shape, fields.of(name))});
  }
  // Files of Lockstep before parameters had steps of their own have none.
  const json steps = fields.has(kStep) ? fields.take_object(kStep) : json::object();
  for (const auto& [name, step] : steps.items()) {
    index.steps[name] = double(whole_number(step, fields.of("step " + name), 0, INT64_MAX));
  }
  fields.require_no_others();
  require(!index.parameters.empty() && index.states.front() == kValues,
          "{}: shards without values, expected those of a network; {}", what, kAdvice);
  std::vector<std::string> states = index.states;
  std::ranges::sort(states);
  const auto twice = std::ranges::adjacent_find(states);
  require(twice == states.end(), "{}: the state {} is listed twice, expected once; {}", what,
          twice == states.end() ? "" : shortened(*twice), kAdvice);
  return index;
}

}  // namespace lockstep
