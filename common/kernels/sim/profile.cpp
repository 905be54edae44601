#include "common/kernels/sim/profile.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <vector>

#include "common/core/error.h"
#include "common/core/parse.h"
#include "common/io/file.h"
#include "common/io/json.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr double kMostSeconds = 1e6;  // of one operation or message: sums of many still fit
constexpr double kMostBytes = 1e18;   // of a device's memory, likewise
constexpr int64_t kMostLanes = 1024;

int64_t whole_ns(double seconds) {
  require(
      seconds <= kMostSeconds,
      "simulated devices: one operation or message takes {:g} s, expected at most {:g}; look at "
      "the profile's seconds and rates",
      seconds, kMostSeconds);
  return std::llround(1e9 * seconds);
}

/// A file's object, and what it is called in errors.
struct Entry {
  const json& value;
  std::string what;

  Entry at(const std::string& key) const {
    require(value.is_object() && value.contains(key), "{}: has no '{}'; see common/kernels/sim/",
            what, key);
    return {value.at(key), what + ": " + key};
  }
  std::string text() const {
    require(value.is_string(), "{}: found {}, expected a text", what, value.dump());
    return value;
  }
  /// A number from `least` on.
  double number(double least) const {
    require(value.is_number() && value.get<double>() >= least,
            "{}: found {}, expected a number from {:g} on", what, value.dump(), least);
    return value;
  }
  int64_t whole(int64_t least, int64_t most) const {
    require(value.is_number_integer() && value >= least && value <= most,
            "{}: found {}, expected a whole number from {} to {}", what, value.dump(), least, most);
    return value;
  }
  int64_t bytes() const {
    require(number(1) <= kMostBytes, "{}: found {}, expected at most {:g}", what, value.dump(),
            kMostBytes);
    return int64_t(number(1));
  }
};

/// Of what divides.
constexpr double kLeastRate = 1e-3;

OperationCost operation_cost(const Entry& entry) {
  return {.seconds = entry.at("seconds").number(0),
          .flops = entry.at("flops").number(kLeastRate),
          .bytes = entry.at("bytes").number(kLeastRate)};
}

LinkCost link_cost(const Entry& entry) {
  return {.seconds = entry.at("seconds").number(0), .bytes = entry.at("bytes").number(kLeastRate)};
}

std::filesystem::path profile_path(const std::string& name) {
  if (name.find('/') != name.npos) return name;
  return std::filesystem::path(LOCKSTEP_PROFILES) / (name + ".json");
}

}  // namespace

double Profile::padding_factor(int64_t channels) const {
  const int64_t vectors = (channels + lanes - 1) / lanes;
  return double(vectors * lanes) / double(channels);
}

const OperationCost& Profile::cost_of(const std::string& op, int64_t window) const {
  auto found = operations.end();
  if (window > 0) found = operations.find(fmt::format("{} {}x{}", op, window, window));
  if (found == operations.end()) found = operations.find(op);
  return found != operations.end() ? found->second : operations.at("default");
}

int64_t Profile::operation_ns(const OperationCost& cost, double flops, double bytes,
                              int devices) const {
  const size_t known = std::min(size_t(devices), crowded.size());
  const double factor = known == 0 ? 1 : crowded[known - 1];
  return whole_ns(factor * (cost.seconds + std::max(flops / cost.flops, bytes / cost.bytes)));
}

int64_t Profile::make_batch_ns(int64_t samples) const {
  return whole_ns(batch_seconds + sample_seconds * double(samples));
}

int64_t Profile::transfer_ns(Link link, double bytes) const {
  return whole_ns(bytes / links.at(size_t(link)).bytes);
}

int64_t Profile::latency_ns(Link link) const { return whole_ns(links.at(size_t(link)).seconds); }

std::shared_ptr<const Profile> read_profile(const std::string& name) {
  const std::filesystem::path path = profile_path(name);
  require(std::filesystem::exists(path),
          "--devices sim:{}: there is no profile {}; choose one of tools/profiles, or give the "
          "path of another",
          name, path.string());
  const std::string what = path.string();
  const std::vector<std::byte> bytes = read_file(path);
  const json file =
      parse_strictly({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, what, 8);
  const Entry all{file, what};
  Profile profile{.name = path.stem(),
                  .device = all.at("device").text(),
                  .source = all.at("source").text(),
                  .memory_bytes = all.at("memory_bytes").bytes(),
                  .operations = {},
                  .crowded = {},
                  .launch_ns = whole_ns(all.at("launch_seconds").number(0)),
                  .batch_seconds = all.at("batch_seconds").number(0),
                  .links = {}};
  const Entry operations = all.at("operations");
  profile.operations["default"] = operation_cost(operations.at("default"));
  for (const auto& [op, cost] : operations.value.items()) {
    profile.operations[op] = operation_cost(operations.at(op));
  }
  if (file.contains("sample_seconds")) profile.sample_seconds = all.at("sample_seconds").number(0);
  if (file.contains("wake_seconds")) profile.wake_ns = whole_ns(all.at("wake_seconds").number(0));
  if (file.contains("lanes")) profile.lanes = all.at("lanes").whole(1, kMostLanes);
  if (file.contains("crowded")) {
    const Entry crowded = all.at("crowded");
    require(crowded.value.is_array(), "{}: found {}, expected a list of numbers", crowded.what,
            crowded.value.dump());
    for (const json& factor : crowded.value)
      profile.crowded.push_back(Entry{factor, crowded.what}.number(kLeastRate));
  }
  for (const Link link : {Link::host, Link::device, Link::network}) {
    profile.links.at(size_t(link)) = link_cost(all.at("links").at(name_of(link)));
  }
  return std::make_shared<const Profile>(std::move(profile));
}

}  // namespace lockstep
