// The training state: a checkpoint's counters and settings as text.

#include <algorithm>
#include <functional>

#include "common/core/error.h"
#include "common/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/mutator.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/training_state_support.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using testing::message_of;
using testing::operator+;

// --- The training state --------------------------------------------------------------------------

TrainingState some_state() {
  TrainingState state;
  state.epoch = 3;
  state.step_in_epoch = 17;
  state.steps = 2831;
  state.learning_rate = 0.1 / 3;
  state.best_accuracy = 0.8123;
  state.world_size = 2;
  state.settings = {{"model", "seed-bn"}, {"lr", 0.1}, {"dropout", true}, {"seed", 4294967295}};
  return state;
}

TEST_CASE("A training state survives its text", "[checkpoint]") {
  const TrainingState state = some_state();
  CHECK(TrainingState::from_json(state.to_json(), "it") == state);
  CHECK(state.to_json().find('\n') == std::string::npos);
}

TEST_CASE("A state says into how many parts a batch is divided where ranks share samples",
          "[checkpoint]") {
  TrainingState state = some_state();
  CHECK(state.parts_of_batch() == 2);
  CHECK_FALSE(json::parse(state.to_json()).contains("sample_parts"));
  state.sample_parts = 1;
  CHECK(TrainingState::from_json(state.to_json(), "it") == state);
  CHECK(state.parts_of_batch() == 1);
}

TEST_CASE("A state of fp16 has the scale of the loss, and no other has one",
          "[checkpoint][sixteen]") {
  TrainingState state = some_state();
  CHECK_FALSE(json::parse(state.to_json()).contains("loss_scale"));
  state.loss_scale = 1024, state.good_steps = 7, state.skipped_steps = 2;
  CHECK(TrainingState::from_json(state.to_json(), "it") == state);
  const auto refuses = [&](const char* field, const json& value, const std::string& expected) {
    json fields = json::parse(state.to_json());
    fields["loss_scale"][field] = value;
    CHECK_THAT(message_of<BadInput>([&] { TrainingState::from_json(fields.dump(), "file"); }),
               ContainsSubstring("file: ") && ContainsSubstring(expected));
  };
  refuses("scale", 0, "scale is 0, expected a number above 0");
  refuses("good_steps", 0.5, "good_steps is 0.5, expected a whole number");
  refuses("more", 1, R"(loss_scale has {"more":1}, expected nothing else)");
}

TEST_CASE("A training state that is not exactly one is refused", "[checkpoint][row112]") {
  const auto refuses = [](const std::function<void(json&)>& change, const std::string& expected) {
    json fields = json::parse(some_state().to_json());
    change(fields);
    const std::string text = fields.dump();
    CHECK_THAT(message_of<BadInput>([&] { TrainingState::from_json(text, "file"); }),
               ContainsSubstring("file: ") && ContainsSubstring(expected));
  };
  const json fields = json::parse(some_state().to_json());
  for (const auto& [name, value] : fields.items()) {
    const std::string key = name;
    refuses([&](json& f) { f.erase(key); }, "no " + key + ", expected one");
    for (const json& wrong : {json("7"), json(), json::array({1}), json(true)}) {
      refuses([&](json& f) { f[key] = wrong; }, "expected");
    }
  }
  refuses([](json& f) { f["epoch"] = -1; }, "epoch is -1, expected a whole number");
  refuses([](json& f) { f["epoch"] = 1.5; }, "epoch is 1.5, expected a whole number");
  refuses([](json& f) { f["steps"] = 1ULL << 63; }, "steps is 9223372036854775808");
  refuses([](json& f) { f["world_size"] = 0; }, "world_size is 0");
  refuses([](json& f) { f["sample_parts"] = 0; },
          "sample_parts is 0, expected a whole number from 1 to 2");
  refuses([](json& f) { f["sample_parts"] = 3; },
          "sample_parts is 3, expected a whole number from 1 to 2");
  refuses([](json& f) { f["learning_rate"] = -1; },
          "learning_rate is -1, expected a number from 0");
  refuses([](json& f) { f["best_accuracy"] = 7; }, "best_accuracy is 7, expected at most 1");
  refuses([](json& f) { f["format_version"] = 0; }, "format version 0, expected 1");
  refuses([](json& f) { f["more"] = 1; }, "found {\"more\":1}, which format version 1");
  refuses([](json& f) { f["settings"]["x"] = json::array(); }, "nests deeper than 2");
  for (const char* text : {"", "{", "[]", "7", "[[[[", "\xFF", "{\"epoch\":1}"}) {
    CHECK_THROWS_AS(TrainingState::from_json(text, "file"), BadInput);
  }
}

TEST_CASE("A training state damaged at random is read or refused in one line",
          "[checkpoint][row112]") {
  const std::string whole = testing::io::file_of(some_state().to_json());
  const unsigned mutations = testing::full_campaign() ? 100'000 : 2000;
  int accepted = 0;
  for (unsigned seed = 0; seed < mutations; ++seed) {
    const std::string file = testing::io::Mutator(seed).mutate(whole);
    try {
      accepted +=
          testing::check_training_state(file.substr(std::min<size_t>(8, file.size()))).empty();
    } catch (const std::exception& error) {  // anything but BadInput
      FAIL("seed " << seed << ": " << error.what());
    }
  }
  CHECK(accepted > 100);  // values may change
}

}  // namespace
}  // namespace lockstep
