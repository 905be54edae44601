// The settings that ranks compare before the first step, and those that a checkpoint keeps.

#include <array>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "05-syncbn-checkpoint/stage_options.h"
#include "common/core/error.h"
#include "common/io/json.h"
#include "common/options/option_parser.h"
#include "tests/support/captured_output.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/free_port.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/rank_threads.h"

namespace lockstep {
namespace {

using Catch::Matchers::StartsWith;
using nlohmann::json;
using testing::message_of;
using Names = std::set<std::string>;

/// What a rank is started with: its options and data.
struct Started {
  CheckpointStageOptions options{};
  std::string images = "synthetic:20:8";  // the data set that it finds

  OptionTable table() const { return table_of(options); }
  /// Without the groups that stage 05 adds.
  OptionTable table_of_stage04() const {
    DdpStageOptions those;
    static_cast<Options&>(those) = options;
    those.ranks = options.ranks;
    those.replica = options.replica;
    those.step = options.step;
    return table_of(those);
  }
};

/// Another value of one setting, and the name that the message has for it.
struct Change {
  std::string name;
  std::function<void(Started&)> apply;
};

/// A change of every setting that weights depend on, or the number of calls.
const std::vector<Change>& changes_of_stage04() {
  static const auto& changes = *new std::vector<Change>{
      {"data", [](Started& s) { s.options.data = "mnist"; }},
      {"model", [](Started& s) { s.options.model = ModelKind::seed_bn; }},
      {"width", [](Started& s) { s.options.width = 32; }},
      {"depth", [](Started& s) { s.options.depth = 3; }},
      {"init", [](Started& s) { s.options.init = Initializer::normal; }},
      {"epochs", [](Started& s) { s.options.epochs = 2; }},
      {"max_steps", [](Started& s) { s.options.max_steps = 7; }},
      {"batch_size", [](Started& s) { s.options.batch_size = 32; }},
      {"lr", [](Started& s) { s.options.lr = 0.2; }},
      {"scale_lr", [](Started& s) { s.options.scale_lr = 64; }},
      {"warmup_epochs", [](Started& s) { s.options.warmup_epochs = 0.5; }},
      {"lr_step", [](Started& s) { s.options.lr_step = 3; }},
      {"lr_gamma", [](Started& s) { s.options.lr_gamma = 0.5; }},
      {"optimizer", [](Started& s) { s.options.optimizer = OptimizerKind::adam; }},
      {"momentum", [](Started& s) { s.options.momentum = 0.9; }},
      {"betas", [](Started& s) { s.options.betas[1] = 0.99; }},
      {"eps", [](Started& s) { s.options.eps = 1e-3; }},
      {"weight_decay", [](Started& s) { s.options.weight_decay = 0.1; }},
      {"seed", [](Started& s) { s.options.seed = 2; }},
      {"order", [](Started& s) { s.options.order = OrderKind::file; }},
      {"emulate", [](Started& s) { s.options.emulate = BatchSplit::from("chunk:2"); }},
      {"dropout", [](Started& s) { s.options.dropout = true; }},
      {"graph", [](Started& s) { s.options.graph = true; }},
      {"tf32", [](Started& s) { s.options.tf32 = true; }},
      {"drop_last", [](Started& s) { s.options.drop_last = true; }},
      {"ddp", [](Started& s) { s.options.replica.ddp = ReplicaKind::manual; }},
      {"all_reduce", [](Started& s) { s.options.replica.all_reduce = AllReduceKind::ring; }},
      {"compress", [](Started& s) { s.options.replica.compress = Compression::bf16; }},
      {"bucket_mb", [](Started& s) { s.options.replica.buckets.bucket_mb = 1; }},
      {"no_broadcast_buffers", [](Started& s) { s.options.step.no_broadcast_buffers = true; }},
      {"find_unused_parameters",
       [](Started& s) { s.options.replica.find_unused_parameters = true; }},
      {"accumulate", [](Started& s) { s.options.step.accumulate = 2; }},
      {"clip_norm", [](Started& s) { s.options.step.clip_norm = 1; }},
      {"pad", [](Started& s) { s.options.step.pad = true; }},
      {"precision", [](Started& s) { s.options.precision = Precision::bf16; }},
      {"growth_interval", [](Started& s) { s.options.growth_interval = 7; }},
      {"training_samples", [](Started& s) { s.images = "synthetic:21:8"; }},
      {"test_samples", [](Started& s) { s.images = "synthetic:20:9"; }}};
  return changes;
}

const std::vector<Change>& changes_of_stage05() {
  static const auto& changes = *new std::vector<Change>{
      {"sync_bn", [](Started& s) { s.options.sync_bn.no_sync_bn = true; }},
      {"sync_bn_group", [](Started& s) { s.options.sync_bn.sync_bn_group = 2; }},
      {"saves", [](Started& s) { s.options.saving.directory = "somewhere"; }},
      {"save_every", [](Started& s) { s.options.saving.save_every = 5; }},
      {"resumes", [](Started& s) { s.options.saving.resume = "auto"; }}};
  return changes;
}

/// The settings that each rank may choose.
const std::vector<Change>& own_business() {
  static const auto& changes = *new std::vector<Change>{
      {"data_dir", [](Started& s) { s.options.data_dir = "elsewhere"; }},
      {"devices", [](Started& s) { s.options.devices = "cpu:1"; }},
      {"nodes", [](Started& s) { s.options.nodes = 2; }},
      {"threads_per_device", [](Started& s) { s.options.threads_per_device = 2; }},
      {"bind", [](Started& s) { s.options.bind = true; }},
      {"no_bind", [](Started& s) { s.options.no_bind = true; }},
      {"nchw", [](Started& s) { s.options.nchw = true; }},
      {"workers", [](Started& s) { s.options.workers = 3; }},
      {"prefetch_factor", [](Started& s) { s.options.prefetch_factor = 3; }},
      {"loader_timeout", [](Started& s) { s.options.loader_timeout = 3; }},
      {"log_interval", [](Started& s) { s.options.log_interval = 3; }},
      {"load", [](Started& s) { s.options.load = "file"; }},
      {"save", [](Started& s) { s.options.save = "file"; }}};
  return changes;
}

Names names_of(const json& settings) {
  Names names;
  for (const auto& [name, value] : settings.items()) names.insert(name);
  return names;
}

const DatasetPair& images_of(const Started& started) {
  static auto& sets = *new std::map<std::string, DatasetPair>;
  const auto known = sets.find(started.images);
  if (known != sets.end()) return known->second;
  return sets.emplace(started.images, load_dataset(started.images)).first->second;
}

/// A group of one rank, for what needs any group.
ProcessGroup group_alone() { return {testing::contract_of(0, 1, 0), {.backend = "tcp"}}; }

// --- One description of every option -------------------------------------------------------------

Names words(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

/// Every option's setting, by who must have the same. This list is part of the format of
/// checkpoints: a name that moves makes older ones useless, or lets ranks train different networks.
const std::map<Role, Names>& names_by_role() {
  static const auto& names = *new std::map<Role, Names>{
      {Role::all_runs,
       words("data model width depth init batch_size lr scale_lr warmup_epochs lr_step lr_gamma "
             "momentum "
             "optimizer betas eps weight_decay seed order emulate dropout precision "
             "growth_interval graph tf32 drop_last ddp "
             "all_reduce compress "
             "bucket_mb no_broadcast_buffers find_unused_parameters accumulate clip_norm pad "
             "sync_bn sync_bn_group")},
      {Role::all_ranks, words("epochs max_steps saves save_every resumes")},
      {Role::rounding, words("threads_per_device backend")},
      {Role::per_rank,
       words("data_dir devices nodes workers prefetch_factor loader_timeout log_interval load "
             "save init_method rank world_size local_rank bind no_bind nchw timeout "
             "no_overlap keep allow_world_size_change")},
      {Role::report, words("metrics trace flight")}};
  return names;
}

TEST_CASE("Every option says who must have the same value, and no other option has its name",
          "[ddp][checkpoint]") {
  const OptionTable table = table_of(CheckpointStageOptions());
  std::map<Role, Names> found;
  for (const OptionRow& row : table) {
    INFO(row.name);
    CHECK(found[row.role].insert(row.setting_name).second);
  }
  CHECK(found == names_by_role());
  for (const auto& [role, names] : names_by_role()) {
    CHECK(names_of(settings_of(table, {role})) == names);
  }
}

/// A run as it was started when every list of settings was still written by hand, and what it saved
/// then, letter by letter: whole numbers without a point, others with one.
Started run_of_the_lists() {
  Started run;
  run.images = run.options.data = "synthetic:32:8";
  run.options.model = ModelKind::seed_bn, run.options.order = OrderKind::sampler,
  run.options.devices = "cpu:0";
  run.options.batch_size = 16, run.options.lr = 0.05, run.options.max_steps = 3;
  run.options.threads_per_device = 2, run.options.metrics = "m.json";
  run.options.step.accumulate = 2, run.options.step.clip_norm = 3;
  run.options.saving.directory = "c", run.options.saving.save_every = 1;
  return run;
}

/// With the options that came later.
constexpr const char* kConfigOfTheLists =
    R"({"batch_size":16,"betas":"0.9,0.999","bind":false,"data":"synthetic:32:8","data_dir":"","depth":5,"devices":"cpu:0",)"
    R"("drop_last":false,"dropout":false,"emulate":"none","epochs":1,)"
    R"("eps":1e-08,"graph":false,"growth_interval":2000,)"
    R"("init":"kaiming","load":"","loader_timeout":0.0,"log_interval":100,"lr":0.05,)"
    R"("lr_gamma":0.1,"lr_step":0,"max_steps":3,"model":"seed-bn","momentum":0.0,)"
    R"("nchw":false,"no_bind":false,"nodes":1,"optimizer":"sgd","order":"sampler","precision":"float32","prefetch_factor":2,"save":"","scale_lr":0.0,)"
    R"("seed":1,"tf32":false,)"
    R"("threads_per_device":2,"warmup_epochs":0.0,"weight_decay":0.0,"width":64,"workers":1})";

constexpr const char* kKeptOfTheLists =
    R"({"accumulate":2,"all_reduce":"library","backend":"tcp","batch_size":16,)"
    R"("betas":"0.9,0.999","bucket_mb":-1.0,)"
    R"("clip_norm":3.0,"compress":"none","data":"synthetic:32:8","data_crc32":"83543f91","ddp":"bucketed","depth":5,)"
    R"("drop_last":false,"dropout":false,"emulate":"none","eps":1e-08,"find_unused_parameters":false,)"
    R"("graph":false,"growth_interval":2000,"init":"kaiming","lr":0.05,"lr_gamma":0.1,"lr_step":0,"model":"seed-bn",)"
    R"("momentum":0.0,"no_broadcast_buffers":false,"optimizer":"sgd","order":"sampler","pad":false,)"
    R"("precision":"float32","scale_lr":0.0,"seed":1,"sync_bn":true,"sync_bn_group":0,"test_samples":8,)"
    R"("tf32":false,"threads_per_device":2,"training_samples":32,"warmup_epochs":0.0,)"
    R"("weight_decay":0.0,"width":64})";

TEST_CASE("Metrics and checkpoints have the names and values that they always had",
          "[checkpoint]") {
  const Started run = run_of_the_lists();
  json config = run.options.to_json();
  if (testing::kDouble) config["precision"] = "float32";
  CHECK(config.dump() == kConfigOfTheLists);
  ProcessGroup group = group_alone();
  json kept = first_state(run.table(), images_of(run), group, {}).settings;
  if (testing::kDouble) kept["precision"] = "float32";
  CHECK(kept.dump() == kKeptOfTheLists);
}

// --- Between ranks -------------------------------------------------------------------------------

/// Two ranks compare their settings, and rank 1 has a change; one pair of ranks for each change.
/// The messages, [rank][change]. With `stage05` as its program does, otherwise as stage 04's.
std::vector<std::vector<std::string>> compared(const std::vector<Change>& changes, bool stage05) {
  for (const Change& change : changes) {  // the sets of images, before there are two threads
    Started started;
    change.apply(started);
    images_of(started);
  }
  images_of(Started());
  std::vector<std::vector<std::string>> told(2);
  for (const Change& change : changes) {
    const int port = testing::free_port();
    const auto errors = testing::run_ranks(2, [&](int rank) {
      ProcessGroup group(testing::contract_of(rank, 2, port), {.backend = "tcp"});
      Started started;
      if (rank == 1) change.apply(started);
      const DatasetPair& data = images_of(started);
      require_same_settings(group, stage05 ? started.table() : started.table_of_stage04(), data);
    });
    for (size_t rank : {0u, 1u}) told[rank].push_back(errors.at(rank));
  }
  return told;
}

void check_told(const std::vector<Change>& changes, bool stage05) {
  const auto told = compared(changes, stage05);
  for (size_t i = 0; i < changes.size(); ++i) {
    INFO(changes[i].name << " in stage " << (stage05 ? "05" : "04"));
    CHECK_THAT(told[0].at(i), StartsWith(changes[i].name + ": rank 0 has "));
    CHECK(told[1].at(i) == told[0].at(i));
  }
}

TEST_CASE("Ranks compare every setting that weights depend on, and tell its name",
          "[ddp][checkpoint][row86]") {
  check_told(changes_of_stage04(), false);
  check_told(changes_of_stage05(), true);
  if (testing::full_campaign()) check_told(changes_of_stage04(), true);
  // A rank may choose the settings that are its own.
  for (const bool stage05 : {false, true}) {
    for (const auto& of_rank : compared(own_business(), stage05)) {
      CHECK(of_rank == std::vector<std::string>(own_business().size()));
    }
  }
}

TEST_CASE("No setting is forgotten by the comparison, or by its test", "[ddp]") {
  const Started started;
  const json shared = shared_settings(started.table_of_stage04(), images_of(started));
  CHECK(shared["precision"] == (testing::kDouble ? "float64" : "float32"));
  Names tested, options;
  for (const Change& change : changes_of_stage04()) tested.insert(change.name);
  CHECK(names_of(shared) == tested);
  // Every option is either compared or a rank's own business.
  for (const Change& change : own_business()) tested.insert(change.name);
  for (const std::string& name : names_of(started.options.to_json())) {
    INFO(name);
    CHECK(tested.contains(name));
  }
}

// --- From a run to the one that goes on ----------------------------------------------------------

TEST_CASE("A checkpoint keeps every setting but how long the run is", "[checkpoint]") {
  const auto settings = [](const Started& started) {
    return training_settings(started.table(), images_of(started));
  };
  const json begin = settings({});
  Names expected{"threads_per_device", "backend", "sync_bn", "sync_bn_group", "data_crc32"};
  for (const Change& change : changes_of_stage04()) expected.insert(change.name);
  for (const char* how_long : {"epochs", "max_steps"}) expected.erase(how_long);
  CHECK(names_of(begin) == expected);
  for (const Change& change : changes_of_stage04()) {
    INFO(change.name);
    Started changed;
    change.apply(changed);
    CHECK((settings(changed) == begin) == !expected.contains(change.name));
  }
  Started more_threads;
  more_threads.options.threads_per_device = 2;
  CHECK(settings(more_threads)["threads_per_device"] == 2);
}

TEST_CASE("A run does not go on with another value of any setting it began with", "[checkpoint]") {
  const Started started;
  ProcessGroup group = group_alone();
  const json saved = first_state(started.table(), images_of(started), group, {}).settings;
  for (const std::string& name : names_of(saved)) {
    INFO(name);
    json other = saved;
    other[name] = "another";
    const bool order_of_sums = name == "backend" || name == "threads_per_device";
    CHECK(other_order_of_sums(saved, other).empty() == !order_of_sums);
    if (order_of_sums) {
      CHECK_NOTHROW(require_saved_settings(saved, other, "F"));
    } else {
      CHECK_THAT(message_of<BadInput>([&] { require_saved_settings(saved, other, "F"); }),
                 StartsWith("F was saved with " + name + " "));
    }
  }
}

TEST_CASE("A stage resumes what was saved with an option that it has no longer, if by default",
          "[checkpoint]") {
  json saved = training_settings(Started().table(), images_of({}));
  json found = saved;
  found.erase("ddp");
  CHECK_NOTHROW(require_saved_settings(saved, found, "F"));
  saved["ddp"] = "manual";
  CHECK_THAT(message_of<BadInput>([&] { require_saved_settings(saved, found, "F"); }),
             StartsWith("F was saved with ddp \"manual\", this run has \"bucketed\""));
}

TEST_CASE("An option that there was not yet when a checkpoint was saved had its default",
          "[checkpoint]") {
  const Started started;
  const json found = training_settings(started.table(), images_of(started));
  json saved = found;
  saved.erase("sync_bn_group");
  CHECK_NOTHROW(require_saved_settings(saved, found, "F"));
  json grouped = found;
  grouped["sync_bn_group"] = 2;
  CHECK_THAT(message_of<BadInput>([&] { require_saved_settings(saved, grouped, "F"); }),
             StartsWith("F was saved with sync_bn_group 0, this run has 2"));
}

// --- How to add an option ------------------------------------------------------------------------

enum class Shade { light, dark };
constexpr auto words_of(Shade) { return std::array{"light", "dark"}; }

/// The options of this stage after somebody has done what common/README.md says.
struct WithOneMore : CheckpointStageOptions {
  Shade shade = Shade::light;

  void add_to(OptionParser& parser) {
    CheckpointStageOptions::add_to(parser);
    parser.add("--shade", shade, "of the colour");
  }
};

TEST_CASE("A member and one add() are an option: in the help, between ranks, in files",
          "[options][checkpoint]") {
  WithOneMore usual, options;
  OptionParser parser("program", "-");
  options.add_to(parser);
  const testing::TempDir folder;
  {
    const testing::CapturedOutput output(folder / "help");
    const char* const words[] = {"program", "--help"};
    parser.parse(2, words);
  }
  std::stringstream help;
  help << std::ifstream(folder / "help").rdbuf();
  CHECK_THAT(help.str(), Catch::Matchers::ContainsSubstring("--shade {light,dark}"));
  const char* const words[] = {"program", "--shade", "dark"};
  CHECK(parser.parse(3, words));
  const OptionTable before = table_of(usual), now = table_of(options);
  CHECK(reported_settings(now)["shade"] == "dark");
  CHECK(words_unlike(before, now) == std::vector<std::string>{"--shade", "dark"});

  const Started plain;
  const DatasetPair& data = images_of(plain);
  const int port = testing::free_port();
  const auto told = testing::run_ranks(2, [&](int rank) {
    ProcessGroup group(testing::contract_of(rank, 2, port), {.backend = "tcp"});
    require_same_settings(group, rank == 0 ? before : now, data);
  });
  CHECK_THAT(told.at(0), StartsWith("shade: rank 0 has \"light\", rank 1 has \"dark\""));
  const json saved = training_settings(before, data), found = training_settings(now, data);
  CHECK_THAT(message_of<BadInput>([&] { require_saved_settings(saved, found, "F"); }),
             StartsWith("F was saved with shade \"light\", this run has \"dark\""));
}

TEST_CASE("A run begins with the learning rate of its first step", "[checkpoint]") {
  Started started;
  started.options.lr = 0.5;
  started.options.warmup_epochs = 2;
  ProcessGroup group = group_alone();
  const auto begin = [&] {
    return first_state(started.table(), images_of(started), group,
                       started.options.schedule(/*steps_per_epoch=*/4));
  };
  TrainingState state = begin();
  CHECK(state.learning_rate == 0.5 / 8);  // the first of eight steps of warm-up
  CHECK(state.epoch == 0);
  CHECK(state.steps == 0);
  CHECK(state.step_in_epoch == 0);
  CHECK(state.best_accuracy == 0);
  CHECK(state.world_size == 1);
  CHECK(state.settings["sync_bn"] == true);
  CHECK(state.settings["backend"] == "tcp");
  started.options.warmup_epochs = 0;
  started.options.sync_bn.no_sync_bn = true;
  state = begin();
  CHECK(state.learning_rate == 0.5);
  CHECK(state.settings["sync_bn"] == false);
}

}  // namespace
}  // namespace lockstep
