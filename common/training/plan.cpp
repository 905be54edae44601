#include "common/training/plan.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/options/report.h"

namespace lockstep {

using Json = nlohmann::json;

Plan::Plan(std::string title, std::string unit, std::string counted, std::vector<PlannedLane> lanes)
    : title_(std::move(title)),
      unit_(std::move(unit)),
      counted_(std::move(counted)),
      lanes_(std::move(lanes)) {}

size_t Plan::add(PlannedWork work) {
  require(work.lane < lanes_.size(), "plan: '{}' is on lane {} of {}", work.text, work.lane,
          lanes_.size());
  double begin = 0;
  for (const Placed& placed : placed_) {
    if (placed.work.lane == work.lane) begin = std::max(begin, placed.end);
  }
  for (const size_t place : work.after) {
    require(place < placed_.size(), "plan: '{}' comes after number {} of {}", work.text, place,
            placed_.size());
    begin = std::max(begin, placed_[place].end);
  }
  const double end = begin + work.length;
  placed_.push_back({std::move(work), begin, end});
  return placed_.size() - 1;
}

double Plan::end() const {
  double end = 0;
  for (const Placed& placed : placed_) end = std::max(end, placed.end);
  return end;
}

std::string Plan::json() const {
  auto lanes = Json::array(), work = Json::array();
  for (const PlannedLane& lane : lanes_) {
    const Json most = lane.predicted_most ? Json(*lane.predicted_most) : Json();
    lanes.push_back({{"name", lane.name}, {"predicted_most", most}});
  }
  for (const auto& [planned, begin, end] : placed_) {
    work.push_back({{"lane", planned.lane},
                    {"name", planned.name},
                    {"kind", planned.kind},
                    {"text", planned.text},
                    {"begin", begin},
                    {"end", end},
                    {"after", planned.after},
                    {"takes", planned.takes},
                    {"gives", planned.gives}});
  }
  Json formula;
  if (formula_) formula = {{"text", formula_->text}, {"value", formula_->value}};
  const Json plan{{"title", title_},    {"unit", unit_},  {"counted", counted_}, {"note", note_},
                  {"formula", formula}, {"lanes", lanes}, {"work", work}};
  return plan.dump();
}

void PlannedNetwork::add_to(OptionParser& parser) {
  parser.add("--model", model, "network");
  parser.add("--width", width, "resnet18: first channels; mlp: features / 4", {1, 1024});
}

int print_plan(int argc, char** argv, OptionParser& parser, const std::function<Plan()>& make) {
  hold_standard_streams();
  report_uncaught_errors();
  if (parser.parse(argc, argv)) print_clean("{}\n", make().json());
  require_printed();
  return 0;
}

}  // namespace lockstep
