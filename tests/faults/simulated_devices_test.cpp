// Every program on devices that do not exist: what it shows, what it counts, and what it refuses.

#include <map>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/json.h"
#include "tests/support/machine.h"
#include "tests/support/refusals.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

const Words kPrograms{
    "01-single-gpu", "02-dataparallel",      "03-model-split",   "03-model-split/tensor-split",
    "04-ddp",        "05-syncbn-checkpoint", "06-fully-sharded", "07-mesh"};
const Words kSixSteps{"--data", "synthetic:96:16", "--batch-size", "16"};

/// A run of some steps on these devices.
ProcessResult run_on(const std::string& devices, const std::string& program, const Words& words) {
  const ProcessResult run =
      run_process(Words{stage_binary(program), "--devices", devices} + words, kDeadline);
  INFO(program << ": " << story(run));
  CHECK(run.status == 0);
  return run;
}

nlohmann::json metrics_on(const std::string& devices, const std::string& program,
                          const Words& words) {
  const TempDir folder;
  run_on(devices, program, kSixSteps + Words{"--metrics", folder / "metrics"} + words);
  return read_json(folder / "metrics");
}

TEST_CASE("Every program runs on simulated devices, twice alike, without a loss", "[faults][sim]") {
  for (const std::string& program : kPrograms) {
    const TempDir folder;
    const Words words = kSixSteps + Words{"--trace", folder / "trace"};
    const std::string out = run_on("sim:2", program, words).out,
                      trace = read_text(folder / "trace");
    CHECK_THAT(out, ContainsSubstring("simulated: no loss"));
    CHECK_THAT(out, !ContainsSubstring("Test set"));
    // No real clock shows, and no number of the machine's.
    CHECK(run_on("sim:2", program, words).out == out);
    CHECK((read_text(folder / "trace") == trace));
  }
}

/// The bytes that rank 0 sends in a step, and the most that its device has of buffers: of tensors,
/// not of libraries' workspaces.
std::pair<double, int64_t> sent_and_kept(nlohmann::json metrics, const std::string& key) {
  nlohmann::json sent = metrics.at(key);
  if (sent.contains("bytes_per_step")) sent = sent.at("bytes_per_step");
  const int64_t peak = metrics.at("peak_memory_bytes").at(0);
  return {sent.at("sent"), peak - metrics.at("workspace_bytes").at(0).get<int64_t>()};
}

TEST_CASE("Simulated ranks send and keep the bytes of ranks that there are", "[faults][sim]") {
  const std::map<std::string, std::string> keys{{"04-ddp", "bytes_per_step"},
                                                {"05-syncbn-checkpoint", "batch_norm"},
                                                {"06-fully-sharded", "bytes_per_step"}};
  for (const auto& [program, key] : keys) {
    for (const int ranks : {2, 3}) {
      INFO(program << " " << ranks << " " << key);
      const auto simulated =
          sent_and_kept(metrics_on(fmt::format("sim:{}", ranks), program, {}), key);
      CHECK(simulated.first > 0);
      CHECK(simulated ==
            sent_and_kept(metrics_on(cpus(ranks), program, {"--backend", "tcp"}), key));
    }
  }
}

// --- Stages of a pipeline: a simulated rank each -------------------------------------------------

const Words kFourMicroBatches{"--accumulate", "4"};

/// The layers of a trace's passes: "forward 0/fc1".
std::set<std::string> passes_in(const std::string& trace) {
  const nlohmann::json all = read_json(trace);
  std::set<std::string> passes;
  for (const nlohmann::json& event : all.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const auto layer = event.at("args").at("layer").get<std::string>();
    if (layer.starts_with("forward ") || layer.starts_with("backward ")) passes.insert(layer);
  }
  return passes;
}

TEST_CASE("Simulated stages of a pipeline make the passes of stages that there are, twice alike",
          "[faults][sim]") {
  const Words pipeline = kSixSteps + kFourMicroBatches + Words{"--mesh", "pipeline=2"};
  const TempDir folder;
  const auto traces_on = [&](const std::string& devices) {
    run_on(devices, "07-mesh", pipeline + Words{"--trace", folder / "trace"});
    return std::pair(read_text(folder / "trace"), read_text(folder / "trace.rank1"));
  };
  const auto passes = [&] {
    return std::pair(passes_in(folder / "trace"), passes_in(folder / "trace.rank1"));
  };
  const auto first = traces_on("sim:2");
  CHECK((traces_on("sim:2") == first));
  const auto simulated = passes();
  traces_on(cpus(2));
  CHECK(simulated.first.contains("backward 3/fc1/fc1"));
  CHECK(simulated.second.contains("forward 3/fc5/fc5"));
  CHECK((simulated == passes()));
}

/// What a rank sends in a step, by axis.
std::map<std::string, double> bytes_along(const nlohmann::json& metrics) {
  std::map<std::string, double> bytes;
  for (const auto& [axis, row] : metrics.at("along").items()) bytes[axis] = row.at("sent");
  return bytes;
}

TEST_CASE("Simulated stages of a pipeline send and keep the bytes of stages that there are",
          "[faults][sim]") {
  for (const std::string mesh : {"pipeline=2,data=2", "data=2,pipeline=2", "shard=2,pipeline=2",
                                 "pipeline=2,tensor=2", "pipeline=4"}) {
    INFO(mesh);
    const Words words = kFourMicroBatches + Words{"--mesh", mesh, "--clip-norm", "1"};
    const nlohmann::json simulated = metrics_on("sim:4", "07-mesh", words);
    const nlohmann::json real = metrics_on(cpus(4), "07-mesh", words + Words{"--backend", "tcp"});
    CHECK(bytes_along(simulated).at("pipeline") > 0);
    CHECK(bytes_along(simulated) == bytes_along(real));
    CHECK(sent_and_kept(simulated, "bytes_per_step") == sent_and_kept(real, "bytes_per_step"));
    CHECK(simulated.at("simulated_ranks") == 4);
    CHECK(simulated.at("devices").size() == (mesh == "pipeline=4" ? 4 : 2));
    CHECK(simulated.at("training_flops") == real.at("training_flops"));
  }
}

TEST_CASE("A pipeline of a thousand simulated ranks takes a thread for each stage",
          "[faults][sim]") {
  const TempDir folder;
  run_on("sim:h100x8", "07-mesh",
         kFourMicroBatches + Words{"--nodes", "128", "--mesh", "data=256,pipeline=4", "--model",
                                   "resnet18", "--width", "64", "--data", "blank:131072:1024",
                                   "--batch-size", "65536", "--metrics", folder / "metrics"});
  const nlohmann::json metrics = read_json(folder / "metrics");
  CHECK(metrics.at("simulated_ranks") == 1024);
  CHECK(metrics.at("devices").size() == 4);
#if !defined(__SANITIZE_ADDRESS__)  // which keeps for a while what was freed
  CHECK(metrics.at("peak_rss_bytes").get<int64_t>() < int64_t{200} << 20);
#endif
}

TEST_CASE("Thousands of ranks take little memory, whatever they would take", "[faults][sim]") {
  for (const std::string program : {"04-ddp", "06-fully-sharded"}) {
    const TempDir folder;
    run_on("sim:8", program,
           {"--nodes", "512", "--model", "resnet18", "--width", "64", "--data", "blank:262144:4096",
            "--batch-size", "262144", "--metrics", folder / "metrics"});
    const nlohmann::json metrics = read_json(folder / "metrics");
    CHECK(metrics.at("simulated_ranks") == 4096);
    CHECK(metrics.at("peak_rss_bytes").get<int64_t>() < int64_t{200} << 20);
    CHECK(metrics.at("peak_memory_bytes").at(0).get<int64_t>() > int64_t{100} << 20);
  }
}

/// A profile with which nothing but what a test asks for takes time.
std::string write_ideal_profile(const TempDir& folder, const std::string& link) {
  const std::string no_time = R"({"seconds": 0, "bytes": 1e30})", path = folder / "ideal.json";
  write_file(path, R"({"device": "ideal", "source": "made up", "memory_bytes": 1e12,
    "launch_seconds": 0, "batch_seconds": 0,
    "operations": {"default": {"seconds": 0, "flops": 1e30, "bytes": 1e30}},
    "links": {"host": )" +
                       no_time + R"(, "device": )" + link + R"(, "network": )" + no_time + "}}");
  return path;
}

TEST_CASE("Simulated pipelines of equal layers have the formula's bubble", "[faults][sim]") {
  const TempDir folder;
  const std::string profile = write_ideal_profile(folder, R"({"seconds": 0, "bytes": 1e30})");
  const ProcessResult run =
      run_process({stage_binary("03-model-split/bubble"), "--devices", "sim:" + profile + "x8",
                   "--sleep", "8", "--stages", "2,4,8", "--metrics", folder / "metrics"},
                  kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  const nlohmann::json rows = read_json(folder / "metrics");
  CHECK(rows.size() > 30);
  for (const nlohmann::json& row : rows) {
    INFO(row.dump());
    // Eight layers of 8 ms, and twice that backward, divided by the stages.
    const double busy = 8 * 3 * 8e-3 / row.at("stages").get<double>();
    const double bubble = 1 - busy / row.at("step_seconds").get<double>();
    CHECK(bubble == Approx(row.at("bubble").at("predicted").get<double>()).margin(1e-9));
  }
}

TEST_CASE("A simulated all-reduce takes the ring's time, for any number of ranks",
          "[faults][sim]") {
  const TempDir folder;
  const std::string profile = write_ideal_profile(folder, R"({"seconds": 1e-5, "bytes": 1e9})");
  for (const int ranks : {2, 8, 64, 1024}) {
    const ProcessResult run =
        run_process({stage_binary("04-ddp/message-sizes"), "--devices",
                     fmt::format("sim:{}x{}", profile, ranks), "--kib", "4096", "--all-reduce",
                     "ring,library", "--metrics", folder / "metrics"},
                    kDeadline);
    INFO(story(run));
    REQUIRE(run.status == 0);
    for (const nlohmann::json& row : read_json(folder / "metrics")) {
      INFO(row.dump());
      const double steps = 2 * (ranks - 1), part = 4096 * 1024.0 / ranks;
      CHECK(row.at("seconds").get<double>() == Approx(steps * (1e-5 + part / 1e9)).epsilon(1e-6));
      CHECK(row.at("sent_bytes").get<double>() == Approx(steps * part));
    }
  }
}

TEST_CASE("Simulated ranks that share out a network send what the formula says", "[faults][sim]") {
  for (const std::string shard : {"optimizer", "gradients", "parameters"}) {
    for (const int ranks : {2, 64, 1024}) {
      const TempDir folder;
      run_on(fmt::format("sim:{}", ranks), "06-fully-sharded",
             {"--shard", shard, "--data", "blank:2048:1024", "--batch-size", "1024", "--metrics",
              folder / "metrics"});
      const nlohmann::json sent = read_json(folder / "metrics").at("bytes_per_step");
      INFO(shard << " " << ranks << " " << sent.dump());
      CHECK(sent.at("sent") == sent.at("predicted"));
    }
  }
}

TEST_CASE("A network that would not fit is counted, and that is said", "[faults][sim]") {
  const Words large{"--model", "resnet18", "--width", "1024", "--data", "blank:64:16"};
  CHECK_THAT(run_on("sim:1", "01-single-gpu", large).out,
             ContainsSubstring("which does not fit into 8192.0 MiB"));
  CHECK_THAT(run_on("sim:1", "01-single-gpu", kSixSteps).out, !ContainsSubstring("does not fit"));
}

TEST_CASE("What simulated devices cannot do is refused in a line", "[faults][sim]") {
  const TempDir folder;
  const auto refused = [&](const std::string& program, const Words& words, const Words& fragments) {
    check_error_line(run_process(Words{stage_binary(program)} + words, kDeadline), fragments);
  };
  const Words two{"--devices", "sim:2"};
  refused("01-single-gpu", two + Words{"--save", folder / "w"}, {"--save", "compute none"});
  refused("01-single-gpu", two + Words{"--load", folder / "w"}, {"--load", "compute none"});
  refused("04-ddp", two + Words{"--baseline"}, {"--baseline", "compute none"});
  refused("05-syncbn-checkpoint", two + Words{"--checkpoint-dir", folder / "c"},
          {"--checkpoint-dir", "compute none"});
  refused("06-fully-sharded", two + Words{"--resume", folder / "c"}, {"--resume", "compute none"});
  refused("01-single-gpu", {"--devices", "sim:0"}, {"sim:0", "from 1 to 1024"});
  refused("01-single-gpu", {"--devices", "sim:1025"}, {"sim:1025", "from 1 to 1024"});
  refused("01-single-gpu", {"--devices", "cpu:0,sim:2"}, {"cpu:0", "sim:2", "one kind"});
  refused("01-single-gpu", kSixSteps + Words{"--devices", "sim:nobody"},
          {"sim:nobody", "no profile"});
  refused("04-ddp", {"--devices", "cpu:0", "--nodes", "2"}, {"--nodes", "simulated devices"});
  refused("02-dataparallel", two + Words{"--nodes", "2"}, {"--nodes", "one host"});
  CHECK(folder.names().empty());
  check_error_line(run_process({stage_binary("04-ddp"), "--devices", "sim:2"}, kDeadline,
                               {{"RANK", "0"},
                                {"WORLD_SIZE", "1"},
                                {"MASTER_ADDR", "127.0.0.1"},
                                {"MASTER_PORT", "29500"}}),
                   {"--devices sim:2", "start it without"});
}

TEST_CASE("Every profile of the tree can be used, and a run says where its figures come from",
          "[faults][sim]") {
  for (const std::string name : {"default", "h100", "h200", "a100", "t4", "laptop"}) {
    const std::string out = run_on("sim:" + name + "x1", "01-single-gpu", kSixSteps).out;
    const std::string path = LOCKSTEP_SOURCE "/tools/profiles/" + name + ".json";
    CHECK_THAT(out, ContainsSubstring(read_json(path).at("source").get<std::string>()));
    const bool from_data_sheets = name != "default" && name != "h200";
    CHECK((out.find("from data sheets, never measured here") != out.npos) == from_data_sheets);
  }
}

TEST_CASE("A profile that is none is refused with the entry that is wrong", "[faults][sim]") {
  const TempDir folder;
  const std::string sound = read_text(LOCKSTEP_SOURCE "/tools/profiles/default.json");
  const auto refused = [&](const std::string& from, const std::string& to, const Words& fragments) {
    std::string text = sound;
    text.replace(text.find(from), from.size(), to);
    write_file(folder / "profile.json", text);
    const Words words{stage_binary("01-single-gpu"), "--devices",
                      "sim:" + std::string(folder / "profile.json")};
    check_error_line(run_process(words + kSixSteps, kDeadline), fragments);
  };
  refused("\"memory_bytes\"", "\"memory\"", {"profile.json", "has no 'memory_bytes'"});
  refused("\"default\": {\"seconds\": 1e-6", "\"default\": {\"seconds\": -1",
          {"default: seconds: found -1", "from 0 on"});
  refused("\"bytes\": 4e9", "\"bytes\": 0", {"device: bytes: found 0", "from 0.001 on"});
  refused("\"network\":", "\"net\":", {"links", "has no 'network'"});
  refused("\"memory_bytes\": 8589934592", "\"memory_bytes\": 1e19",
          {"memory_bytes: found 1e+19", "at most 1e+18"});
  refused("{", "", {"profile.json"});
}

TEST_CASE("Simulated times that no clock counts are refused, and not counted wrongly",
          "[faults][sim]") {
  const TempDir folder;
  const auto told = [&](const std::string& entry, const std::string& seconds) {
    std::string text = read_text(LOCKSTEP_SOURCE "/tools/profiles/default.json");
    const size_t value = text.find(entry) + entry.size();
    text.replace(value, text.find_first_of(",}", value) - value, seconds);
    const std::string profile = folder / "profile.json";
    write_file(profile, text);
    const ProcessResult result =
        run_process({stage_binary("04-ddp"), "--devices", "sim:" + profile + "x2", "--data",
                     "blank:600:10", "--batch-size", "4", "--max-steps", "150"},
                    kDeadline);
    INFO(entry << seconds << story(result));
    CHECK(result.status == 1);
    return result.err;
  };
  for (const std::string entry : {"{\"seconds\": ", "\"launch_seconds\": ", "\"batch_seconds\": ",
                                  "\"device\": {\"seconds\": "}) {
    CHECK_THAT(told(entry, "1e308"), ContainsSubstring("takes 1e+308 s, expected at most 1e+06"));
  }
  for (const std::string entry : {"{\"seconds\": ", "\"launch_seconds\": "}) {  // of each operation
    CHECK_THAT(told(entry, "9e5"), ContainsSubstring("the run takes more than 1e+09 s"));
  }
}

}  // namespace
}  // namespace lockstep
