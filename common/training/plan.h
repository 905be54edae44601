#pragma once
// A step as a plan: what every lane (a device, a stream) does and what it comes after. The page of
// `lockstep show` steps through it.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/nn/models.h"
#include "common/options/option_parser.h"

namespace lockstep {

/// One bar of a lane.
struct PlannedWork {
  size_t lane = 0;
  std::string name;  // in the bar: "F0"
  std::string kind;  // its colour: "forward", "backward", "messages", "memory" or "other"
  std::string text;  // in words: "forward of micro-batch 0"
  double length;     // in the plan's unit
  /// What must have ended before it, besides the work before it on its lane: places, as add() gave
  /// them.
  std::vector<size_t> after{};
  /// How much the lane's count grows when it begins and shrinks when it ends.
  double takes = 0, gives = 0;
};

struct PlannedLane {
  std::string name;
  std::optional<double> predicted_most{};  // of its count, by a formula
};

/// What a formula says about the plan.
struct PlanFormula {
  std::string text;  // "(p-1)/(m+p-1) = 3/11"
  double value;      // the share of all lanes' time in which nothing runs
};

class Plan {
 public:
  /// `counted` says what the lanes' counts are: "live activations".
  Plan(std::string title, std::string unit, std::string counted, std::vector<PlannedLane> lanes);

  /// Adds work, which begins as soon as its lane is free and what it comes after has ended. Returns
  /// its place in the plan.
  size_t add(PlannedWork work);
  void set_formula(PlanFormula formula) { formula_ = std::move(formula); }
  /// What the short names in the bars mean, and the unit.
  void set_note(std::string note) { note_ = std::move(note); }
  /// When the last work ends.
  double end() const;

  /// The plan as JSON:
  ///   {"title", "unit", "counted", "note", "formula": {"text", "value"} or null,
  ///    "lanes": [{"name", "predicted_most" or null}],
  ///    "work": [{"lane", "name", "kind", "text", "begin", "end", "after": [place], "takes",
  ///    "gives"}]}
  std::string json() const;

 private:
  struct Placed {
    PlannedWork work;
    double begin, end;
  };
  std::string title_, unit_, counted_, note_;
  std::vector<PlannedLane> lanes_;
  std::vector<Placed> placed_;
  std::optional<PlanFormula> formula_;
};

/// The network whose step is drawn.
struct PlannedNetwork {
  ModelKind model = ModelKind::resnet18;
  int64_t width = 64;

  void add_to(OptionParser& parser);
  Model make() const { return make_model({.kind = model, .width = width}); }
};

/// The main function of a program that prints a plan: reads the options, then makes it.
int print_plan(int argc, char** argv, OptionParser& parser, const std::function<Plan()>& make);

}  // namespace lockstep
