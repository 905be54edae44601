// --baseline: a speed-up is shown only where the weights are right. Whole runs, ends by signals,
// and the parts of a verdict: weights files, speeds, and options as a command line.

#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <regex>
#include <set>
#include <thread>
#include <tuple>

#include "common/core/error.h"
#include "common/options/options.h"
#include "common/training/verdict.h"
#include "tests/support/catch.h"
#include "tests/support/json.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

// --- Whole runs ----------------------------------------------------------------------------------

// Trains with stage 01 and then does what $FAULT_01 or $FAULT_02 says, whichever program it plays.
// A fault in words of "timed-..." waits for the run that is not the proof. Writes its command
// lines.
constexpr const char* kTrainer = R"(#!/usr/bin/env -S python3 -IS
import json, os, signal, struct, subprocess, sys, time
words, role = sys.argv[1:], "01" if "/01-single-gpu/" in sys.argv[0] else "02"
fault = os.environ.get("FAULT_" + role, "")
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([role, os.environ.get("LOCKSTEP_TEST_NOTE", ""), *words]) + "\n")

def value(name):
    return words[words.index(name) + 1] if name in words else None

if fault.startswith("timed-"):
    fault = "" if value("--save") else fault[6:]
if fault == "exit":
    sys.exit(print("warning: it is hot\nerror: the disk is full", file=sys.stderr) or 3)
if fault == "silent":
    sys.exit(4)
if fault == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if fault.startswith("hang"):
    if fault == "hang-deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.environ["RECORD"] + ".pid", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.environ["RECORD"] + ".hangs")
    time.sleep(600)
if fault == "nothing":
    sys.exit(0)
if fault == "leave":
    left = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(os.environ["RECORD"] + ".left", "w") as file:
        file.write(str(left.pid))
emulated = ["--emulate", "chunk:2"] if fault == "two-devices" else []
status = subprocess.call([os.environ["STAGE01"], *words, *emulated])
if fault == "two-devices" and value("--metrics"):
    with open(value("--metrics")) as file:
        metrics = json.load(file)
    metrics["devices"] = ["cpu:0", "cpu:1"]
    with open(value("--metrics"), "w") as file:
        json.dump(metrics, file)
if fault.startswith("scale=") and value("--save"):  # a layer's weights, by this factor
    with open(value("--save"), "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(size)), bytearray(file.read())
    del header["__metadata__"]  # with the checksums
    tensor = header[min(name for name in header if name.endswith("conv1.weight"))]
    begin, end = tensor["data_offsets"]
    code = f"<{(end - begin) // 4}f" if tensor["dtype"] == "F32" else f"<{(end - begin) // 8}d"
    numbers = struct.unpack(code, data[begin:end])
    data[begin:end] = struct.pack(code, *(float(fault[6:]) * number for number in numbers))
    text = json.dumps(header).encode()
    with open(value("--save"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
if status < 0:  # stage 01 was killed, by a reader that left: so is this program
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
)";

/// A build folder with stage 01 and a stage to be compared with it, both played by kTrainer.
class Stages {
 public:
  Stages() {
    for (const std::string name : {"01-single-gpu", "02-fake", "tmp"}) {
      std::filesystem::create_directory(folder_ / name);
    }
    std::filesystem::copy_file(build_dir() + "/tests/faults/fake-stage", program());
    for (const std::filesystem::path& path : {reference(), in_parts(), trainer()}) {
      write_file(path, kTrainer);
      std::filesystem::permissions(path, std::filesystem::perms(0755));
    }
  }

  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }
  std::filesystem::path reference() const { return folder_ / "01-single-gpu" / "01-single-gpu"; }
  std::filesystem::path in_parts() const { return folder_ / "01-single-gpu" / "reference"; }
  std::filesystem::path trainer() const { return folder_ / "trainer"; }
  std::filesystem::path program() const { return folder_ / "02-fake" / "02-fake"; }

  /// Runs the stage with --baseline, after the words of `prefix`.
  ProcessResult run(const Words& options, const std::string& fault_02 = "",
                    const std::string& fault_01 = "", const Words& prefix = {}) const {
    Words words = prefix +
                  Words{program(), "--baseline", "--trainer", trainer(), "--devices", "cpu:0"} +
                  options;
    if (std::ranges::count(options, "--data") == 0) {
      words = words + Words{"--data", "synthetic:24:4", "--batch-size", "2"};
    }
    const ProcessResult result = run_process(words, kDeadline,
                                             {{"STAGE01", stage_binary("01-single-gpu/reference")},
                                              {"RECORD", folder_ / "record"},
                                              {"TMPDIR", folder_ / "tmp"},
                                              {"FAULT_01", fault_01},
                                              {"FAULT_02", fault_02}});
    CHECK_FALSE(result.timed_out);
    UNSCOPED_INFO(story(result));
    return result;
  }
  bool left_nothing() const { return std::filesystem::is_empty(folder_ / "tmp"); }

  /// The command lines of all children so far: role, note, words.
  std::vector<Words> record() const {
    std::vector<Words> calls;
    std::ifstream file(folder_ / "record");
    for (std::string line; std::getline(file, line);) {
      calls.push_back(nlohmann::json::parse(line).get<Words>());
    }
    return calls;
  }

 private:
  TempDir folder_;
};

/// One line on stderr with all of `fragments`, this status, no speed-up and nothing left.
void check_refused(const Stages& stages, const ProcessResult& run, int status,
                   const Words& fragments) {
  CHECK(run.status == status);
  CHECK(run.err.starts_with("error: "));
  CHECK(run.err.find('\n') == run.err.size() - 1);
  for (const std::string& fragment : fragments) CHECK_THAT(run.err, ContainsSubstring(fragment));
  CHECK_THAT(run.out, !ContainsSubstring("speed-up") && !ContainsSubstring("efficiency"));
  CHECK(stages.left_nothing());
  CHECK_FALSE(std::filesystem::exists(stages / "metrics"));
}

std::string after(const Words& words, const std::string& option) {
  const auto place = std::find(words.begin(), words.end(), option);
  return place == words.end() ? "" : *(place + 1);
}

/// Two optimizers, of which the short campaign takes the second.
Words kinds(const std::string& first, const std::string& second) {
  return full_campaign() ? Words{first, second} : Words{second};
}

TEST_CASE("The same weights earn a speed-up", "[verdict]") {
  const Stages stages;
  const ProcessResult run =
      stages.run({"--metrics", stages / "metrics", "--save", stages / "weights", "--trace",
                  stages / "trace", "--dropout"});
  CHECK(run.status == 0);
  CHECK(run.err.empty());
  CHECK(stages.left_nothing());
  CHECK(std::filesystem::exists(stages / "weights"));
  CHECK(std::filesystem::exists(stages / "trace"));

  const nlohmann::json metrics = read_json(stages / "metrics");
  const nlohmann::json& verdict = metrics.at("baseline");
  CHECK(verdict.at("agrees") == true);
  CHECK(verdict.at("stage") == "01-single-gpu");
  CHECK(verdict.at("proof_value") == 0.0);
  CHECK(verdict.at("proof_limit") == 1e-5);
  CHECK(verdict.at("devices") == 1);
  const double own = verdict.at("samples_per_second");
  const double reference = verdict.at("reference_samples_per_second");
  CHECK(verdict.at("speedup").get<double>() == Approx(own / reference));
  CHECK(own == Approx(warm_speed(metrics, "own").samples_per_second));
  CHECK(metrics.at("speedup") == verdict.at("speedup"));
  CHECK(metrics.at("efficiency") == verdict.at("efficiency"));
  for (const std::string& row :
       {fmt::format("\n  speed-up            {:.2f}\n", verdict.at("speedup").get<double>()),
        fmt::format("\n  01-single-gpu       {:.0f} samples/s, ", reference),
        fmt::format("\n  02-fake             {:.0f} samples/s, ", own), std::string("\n  proof "),
        std::string("\n  efficiency ")}) {
    CHECK_THAT(run.out, ContainsSubstring(row));
  }
  // This stage's output is shown once: that of its timed run.
  const std::regex lines("Train Epoch: 1 \\[0/24");
  CHECK(std::distance(std::sregex_iterator(run.out.begin(), run.out.end(), lines), {}) == 1);
}

TEST_CASE("Both programs of a proof get the same options and safe steps", "[verdict]") {
  const Stages stages;
  const Words typed{"--momentum",  "0.9", "--lr",       "0.05", "--order",        "sampler",
                    "--max-steps", "5",   "--seed",     "6",    "--weight-decay", "0.1",
                    "--lr-step",   "1",   "--lr-gamma", "0.5"};
  CHECK(stages.run(typed + Words{"--note", "a note", "--note", "2"}).status == 0);
  const std::vector<Words> calls = stages.record();
  REQUIRE(calls.size() == 4);  // proof: own, reference; timed: reference, own
  for (const size_t i : {0, 1, 2, 3}) {
    const bool own = i == 0 || i == 3, proof = i < 2;
    INFO("call " << i);
    CHECK(calls[i][0] == (own ? "02" : "01"));
    CHECK(calls[i][1] == (own ? "a note|2" : ""));
    CHECK(after(calls[i], "--order") == "sampler");
    CHECK(after(calls[i], "--seed") == "6");
    CHECK(after(calls[i], "--batch-size") == "2");
    CHECK(after(calls[i], "--lr") == (proof ? "0.01" : "0.05"));
    CHECK(after(calls[i], "--max-steps") == (proof ? "10" : "5"));
    CHECK(after(calls[i], "--momentum") == (proof ? "" : "0.9"));
    CHECK(after(calls[i], "--weight-decay") == (proof ? "" : "0.1"));
    CHECK(after(calls[i], "--lr-step") == (proof ? "" : "1"));
    CHECK(after(calls[i], "--lr-gamma") == (proof ? "" : "0.5"));
    CHECK(after(calls[i], "--save").empty() != proof);
  }
}

TEST_CASE("The proof of Adam trains with Adam, where rounding stays small", "[verdict]") {
  for (const std::string& kind : kinds("adam", "adamw")) {
    const Stages stages;
    const Words typed{"--optimizer", kind, "--betas", "0.5,0.6", "--lr", "0.05"};
    CHECK(stages.run(typed).status == 0);
    const std::vector<Words> calls = stages.record();
    REQUIRE(calls.size() == 4);
    for (const size_t i : {0, 1, 2, 3}) {
      const bool proof = i < 2;
      INFO(kind << ", call " << i);
      CHECK(after(calls[i], "--optimizer") == kind);
      CHECK(after(calls[i], "--betas") == (proof ? "" : "0.5,0.6"));
      CHECK(after(calls[i], "--lr") == (proof ? "0.0001" : "0.05"));
      CHECK(after(calls[i], "--eps") == (proof ? "0.001" : ""));
      CHECK(after(calls[i], "--weight-decay") == (proof ? "0.01" : ""));
    }
  }
}

TEST_CASE("Local batch normalisation is compared with the emulation of its devices", "[verdict]") {
  const Stages stages;
  const Words options{"--model", "seed-bn", "--metrics", stages / "metrics"};
  check_refused(
      stages, stages.run(options + Words{"--global-batch-norm"}, "two-devices"), 1,
      {"the weights of 02-fake are not those of 01-single-gpu", "expected at most 1e-05"});

  CHECK(stages.run(options, "two-devices").status == 0);
  CHECK(after(stages.record().at(3), "--emulate") == "chunk:2");
  const nlohmann::json metrics = read_json(stages / "metrics");
  CHECK(metrics.at("baseline").at("devices") == 2);
  CHECK(metrics.at("efficiency").get<double>() == Approx(metrics.at("speedup").get<double>() / 2));
  // Without batch normalisation there is nothing to emulate.
  CHECK(stages.run({}).status == 0);
  CHECK(after(stages.record().at(7), "--emulate").empty());
}

TEST_CASE("ResNet-18 is judged by one step's change", "[verdict]") {
  const Words small{"--model",        "resnet18",     "--width", "2",        "--data",
                    "synthetic:16:2", "--batch-size", "4",       "--metrics"};
  const Stages stages;
  CHECK(stages.run(small + Words{stages / "metrics"}).status == 0);
  const nlohmann::json verdict = read_json(stages / "metrics").at("baseline");
  CHECK(verdict.at("proof") == "|dw - dw_ref| / |dw_ref|");
  CHECK(verdict.at("proof_limit") == 0.1);
  const std::vector<Words> calls = stages.record();
  REQUIRE(calls.size() == 5);
  CHECK(after(calls[0], "--max-steps") == "1");
  CHECK(after(calls[2], "--epochs") == "0");

  std::filesystem::remove(stages / "metrics");
  check_refused(stages, stages.run(small + Words{stages / "metrics"}, "scale=1.01"), 1,
                {"|dw - dw_ref| / |dw_ref| = ", "expected at most 0.1"});
}

TEST_CASE("Wrong weights earn no speed-up", "[verdict]") {
  const Stages stages;
  const Words options{"--metrics", stages / "metrics"};
  check_refused(stages, stages.run(options, "scale=1.001"), 1,
                {"the weights of 02-fake are not those of 01-single-gpu: |w - w_ref| / |w_ref| = ",
                 "something is wrong in 02-fake", "expected at most 1e-05"});
  check_refused(stages, stages.run(options, "scale=nan"), 1,
                {"|w - w_ref| / |w_ref| = nan", "something is wrong in 02-fake"});
  CHECK(stages.record().size() == 4);  // two proofs, nothing timed
}

TEST_CASE("A child that fails hands on its reason and status", "[verdict]") {
  const Stages stages;
  const Words options{"--metrics", stages / "metrics"};
  for (const bool own : {true, false}) {
    const auto run = [&](const std::string& fault) {
      return stages.run(options, own ? fault : "", own ? "" : fault);
    };
    const std::string name = own ? "02-fake" : "01-single-gpu";
    ProcessResult exits = run("exit");
    CHECK(exits.err.starts_with("warning: it is hot\n"));
    exits.err.erase(0, exits.err.find('\n') + 1);
    check_refused(stages, exits, 3, {name + " ended with status 3: the disk is full\n"});
    check_refused(stages, run("silent"), 4, {name + " ended with status 4: it gave no reason"});
    check_refused(stages, run("kill"), 1, {name + " was killed by signal 9"});
  }
  check_refused(stages, stages.run(options, "nothing"), 1, {"02-fake ended well, but not with"});
  check_refused(stages, stages.run(options, "", "nothing"), 1, {"No such file", "01-single-gpu"});
}

TEST_CASE("Failures of timed runs end without a speed-up, too", "[verdict]") {
  const Stages stages;
  const Words options{"--metrics", stages / "metrics"};
  const ProcessResult run = stages.run(options, "timed-exit");
  CHECK(run.err == "warning: it is hot\nerror: the disk is full\n");  // it said so itself
  CHECK(run.status == 3);
  CHECK_THAT(run.out, !ContainsSubstring("speed-up"));
  CHECK(stages.left_nothing());
  check_refused(stages, stages.run(options, "", "timed-silent"), 4, {"01-single-gpu"});
  if (full_campaign()) {
    check_refused(stages, stages.run(options, "timed-kill"), 1, {"02-fake was killed by signal 9"});
    check_refused(stages, stages.run(options, "timed-nothing"), 1, {"02-fake ended well, but not"});
  }
  check_refused(stages, stages.run(options + Words{"--max-steps", "1"}), 1,
                {"metrics of 01-single-gpu", "at least 2"});
}

TEST_CASE("A reference that is not there is named", "[verdict]") {
  const Stages stages;
  const auto check = [&](const std::string& reason) {
    check_refused(stages, stages.run({}), 1, {stages.reference().string(), reason, "build it"});
    CHECK(stages.record().empty());
  };
  std::filesystem::permissions(stages.reference(), std::filesystem::perms(0644));
  check("Permission denied");
  std::filesystem::remove(stages.reference());
  check("No such file");
  write_file(stages.reference(), std::string("neither a script nor a program"));
  std::filesystem::permissions(stages.reference(), std::filesystem::perms(0755));
  check_refused(stages, stages.run({}), 1, {"cannot start", "Exec format error"});
}

// --- Ends by signals -----------------------------------------------------------------------------

/// Whether a process is there and is no zombie, after a while in which it may end.
bool keeps_running(const std::string& pid) {
  for (int tries = 0; tries < 500; ++tries) {
    std::ifstream file("/proc/" + pid + "/stat");
    std::string line;
    std::getline(file, line);
    const size_t name_end = line.rfind(')');
    if (name_end == std::string::npos || line.at(name_end + 2) == 'Z') return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

/// Runs the stage until its child hangs, then the shell commands of `kill` on it ($pid).
ProcessResult run_and_kill(const Stages& stages, const std::string& fault,
                           const std::string& kill) {
  const std::string hangs = (stages / "record.hangs").string();
  const std::string wait = fmt::format("until [ -e {} ]; do sleep 0.02; done", hangs);
  return stages.run(
      {}, fault, "",
      {"sh", "-c", fmt::format("\"$@\" & pid=$!; {}; {}; wait $pid", wait, kill), "sh"});
}

TEST_CASE("A signal goes on to the child, and then ends the run", "[verdict]") {
  for (const auto& [fault, kill] : {std::pair("hang", "kill -TERM $pid"),
                                    {"timed-hang", "kill -TERM $pid"},
                                    {"hang-deaf", "kill -TERM $pid; sleep 0.5; kill -TERM $pid"}}) {
    INFO(fault);
    const Stages stages;
    const ProcessResult run = run_and_kill(stages, fault, kill);
    CHECK(run.status == 128 + SIGTERM);
    CHECK_THAT(run.err, !ContainsSubstring("error"));
    CHECK_THAT(run.out, !ContainsSubstring("speed-up"));
    CHECK_FALSE(keeps_running(read_text(stages / "record.hangs")));
    CHECK(stages.left_nothing());
  }
}

TEST_CASE("What a child leaves running ends with it", "[verdict]") {
  const Stages stages;
  CHECK(stages.run({}, "leave").status == 0);
  CHECK_FALSE(keeps_running(read_text(stages / "record.left")));
}

TEST_CASE("A child does not outlive a killed parent", "[verdict]") {
  const Stages stages;
  CHECK(run_and_kill(stages, "hang", "kill -KILL $pid").status == 128 + SIGKILL);
  CHECK_FALSE(keeps_running(read_text(stages / "record.hangs")));
}

/// A stage with --baseline; `planted`, if not empty, is the program that takes its place, and makes
/// this mistake.
ProcessResult run_stage(const std::string& stage, const std::string& planted, const Words& options,
                        const std::string& mistake = "") {
  const testing::TempDir build;
  for (const std::string& name : {std::string("01-single-gpu"), stage}) {
    std::filesystem::create_directory(build.path() / name);
    const bool replaced = name == stage && !planted.empty();
    std::filesystem::copy_file(
        replaced ? build_dir() + "/tests/faults/" + planted : stage_binary(name),
        build.path() / name / name);
  }
  return run_process(Words{build.path() / stage / stage, "--baseline", "--devices",
                           "cpu:0,cpu:1,cpu:2", "--data", "synthetic:64:16", "--batch-size", "8"} +
                         options,
                     kDeadline, {{"LOCKSTEP_MISTAKE", mistake}});
}

/// Stage 02, or the planted one with this mistake: "gradient" or "steps".
ProcessResult run_stage02(const std::string& mistake, const Words& options) {
  return run_stage("02-dataparallel", mistake.empty() ? "" : "wrong-stage02", options, mistake);
}

void check_speed_up(const ProcessResult& run, bool right,
                    const std::string& stage = "02-dataparallel") {
  INFO(story(run));
  CHECK(run.status == (right ? 0 : 1));
  CHECK((run.out.find("\n  speed-up ") != run.out.npos) == right);
  if (!right) CHECK_THAT(run.err, ContainsSubstring("the weights of " + stage + " are not"));
}

TEST_CASE("Stage 02 is as good as its speed-up, and without a replica's gradient shows none",
          "[verdict][dataparallel]") {
  check_speed_up(run_stage02("", {}), true);
  check_speed_up(run_stage02("gradient", {}), false);
}

TEST_CASE("Under Adam the wrong gradient and the wrong bias correction show no speed-up",
          "[verdict][dataparallel]") {
  for (const std::string& kind : kinds("adam", "adamw")) {
    INFO(kind);
    const Words options{"--optimizer", kind};
    check_speed_up(run_stage02("", options), true);
    check_speed_up(run_stage02("gradient", options), false);
    check_speed_up(run_stage02("steps", options), false);
  }
  check_speed_up(run_stage02("steps", {}), true);  // SGD does not count steps
}

TEST_CASE("A sharded update whose result the other ranks do not get shows no speed-up",
          "[verdict][sharded]") {
  for (const std::string& kind : kinds("sgd", "adamw")) {
    INFO(kind);
    const Words options{"--model", "seed", "--shard", "optimizer", "--optimizer", kind};
    for (const std::string planted : {"", "forgetful-stage06"}) {
      check_speed_up(run_stage("06-fully-sharded", planted, options), planted.empty(),
                     "06-fully-sharded");
    }
  }
}

TEST_CASE("A reader that leaves ends a comparison without a trace", "[verdict]") {
  for (const int lines : {1, 8}) {  // while this program writes, and while its child does
    INFO(lines << " lines");
    const Stages stages;
    const std::string pipeline =
        fmt::format("{{ \"$@\"; echo \"status $?\" >&2; }} | head -{}", lines);
    const ProcessResult run =
        stages.run({"--log-interval", "1", "--epochs", "10"}, "", "", {"sh", "-c", pipeline, "sh"});
    CHECK(run.err == "status 141\n");  // 128 + SIGPIPE
    CHECK(std::count(run.out.begin(), run.out.end(), '\n') == lines);
    CHECK(stages.left_nothing());
  }
}

/// The one-line BadInput that `call` throws; "" if it throws none.
template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const BadInput& error) {
    CHECK(std::string(error.what()).find('\n') == std::string::npos);
    return error.what();
  }
  return "";
}

// --- Weights files -------------------------------------------------------------------------------

struct Named {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

/// A weights file in `folder`.
std::string save(const TempDir& folder, const std::string& file, const std::vector<Named>& all) {
  std::vector<TensorEntry> entries;
  for (const Named& tensor : all) {
    entries.push_back({.name = tensor.name,
                       .dtype = DType::F32,
                       .shape = tensor.shape,
                       .bytes = std::as_bytes(std::span(tensor.values))});
  }
  save_safetensors(folder / file, entries);
  return folder / file;
}

TEST_CASE("Weights are compared as one vector, without running statistics", "[verdict]") {
  const TempDir folder;
  const std::string reference =
      save(folder, "reference",
           {{"a.weight", {2}, {3, 0}}, {"b", {1}, {4}}, {"n.running_var", {1}, {9}}});
  const std::string near = save(
      folder, "near", {{"a.weight", {2}, {3, 0.5}}, {"b", {1}, {4}}, {"n.running_var", {1}, {1}}});
  CHECK(weights_distance(near, reference) == Approx(0.1));
  CHECK(weights_distance(reference, reference) == 0);

  const std::string initial = save(
      folder, "initial", {{"a.weight", {2}, {3, 0}}, {"b", {1}, {2}}, {"n.running_var", {1}, {1}}});
  CHECK(change_distance(near, reference, initial) == Approx(0.25));
  CHECK(std::isnan(change_distance(reference, reference, reference)));  // nothing was learnt
}

TEST_CASE("A weight that is not finite never agrees", "[verdict]") {
  const TempDir folder;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::string good = save(folder, "good", {{"a", {2}, {1, 2}}});
  const std::string start = save(folder, "start", {{"a", {2}, {0, 0}}});
  const std::string bad = save(folder, "bad", {{"a", {2}, {1, nan}}});
  const auto agrees = [](double distance) { return distance <= 1e30; };
  CHECK(agrees(change_distance(good, good, start)));
  CHECK_FALSE(agrees(weights_distance(bad, good)));
  CHECK_FALSE(agrees(weights_distance(good, bad)));
  CHECK_FALSE(agrees(weights_distance(bad, bad)));
  CHECK_FALSE(agrees(change_distance(bad, good, start)));
  CHECK_FALSE(agrees(change_distance(good, good, bad)));
  CHECK_FALSE(agrees(weights_distance(start, start)));  // 0 / 0
}

TEST_CASE("Files with other parameters are refused by name", "[verdict]") {
  const TempDir folder;
  const std::string one = save(folder, "one", {{"a", {2}, {1, 2}}});
  const std::string two = save(folder, "two", {{"a", {2}, {1, 2}}, {"b", {1}, {1}}});
  const std::string turned = save(folder, "turned", {{"a", {1, 2}, {1, 2}}});
  const auto error = [](const std::string& path, const std::string& reference) {
    return error_of([&] { weights_distance(path, reference); });
  };
  CHECK_THAT(error(one, two), ContainsSubstring(one + ": tensor b is missing"));
  CHECK_THAT(error(two, one), ContainsSubstring(two + ": tensor b is not in " + one));
  CHECK_THAT(error(turned, one), ContainsSubstring("tensor a has shape [1, 2], expected [2]"));
  CHECK_THAT(error_of([&] { change_distance(one, one, two); }), ContainsSubstring(two));
  CHECK_THAT(error(folder / "none", one), ContainsSubstring("No such file"));

  const std::vector<int32_t> integers{1, 2};
  const TensorEntry entry{"a", DType::I32, {2}, std::as_bytes(std::span(integers))};
  save_safetensors(folder / "integers", std::span(&entry, 1));
  CHECK_THAT(error(folder / "integers", one), ContainsSubstring("dtype I32, expected F32 or F64"));
}

// --- Speeds --------------------------------------------------------------------------------------

nlohmann::json metrics_of(const std::vector<double>& step_seconds, double batch_size) {
  const double steps = double(step_seconds.size());
  return {{"step_seconds", step_seconds},
          {"steps", step_seconds.size()},
          {"epochs", 1},
          {"epoch_seconds", {2.0}},
          {"batch_size", batch_size},
          {"samples_per_second", steps * batch_size / 2}};
}

TEST_CASE("A warm step is the median without the first tenth", "[verdict]") {
  const auto step = [](const std::vector<double>& seconds) {
    return warm_speed(metrics_of(seconds, 10), "run").step_seconds;
  };
  CHECK(step({9, 2}) == 2);
  CHECK(step({9, 3, 1, 2}) == 2);
  CHECK(step({9, 1, 2, 3, 4}) == 2.5);
  CHECK(step({0, 1, 1, 1, 1, 5, 5, 5, 5, 5}) == 5);     // one of ten is left out
  CHECK(step({0, 0, 1, 1, 1, 1, 5, 5, 5, 5, 5}) == 5);  // two of eleven
  CHECK(warm_speed(metrics_of({9, 0.5}, 10), "run").samples_per_second == 20);

  // Ten epochs of one step each: the set is smaller than the batch.
  nlohmann::json small = metrics_of(std::vector<double>(10, 0.5), 64);
  small.update({{"epochs", 10},
                {"epoch_seconds", std::vector<double>(10, 0.5)},
                {"samples_per_second", 80.0}});
  CHECK(warm_speed(small, "run").samples_per_second == Approx(80));
}

TEST_CASE("Metrics that give no speed are refused", "[verdict]") {
  const auto error = [](const nlohmann::json& metrics) {
    return error_of([&] { warm_speed(metrics, "metrics of a run"); });
  };
  CHECK_THAT(error(metrics_of({1}, 10)), ContainsSubstring("1 entries, expected at least 2"));
  CHECK_THAT(error(metrics_of({1, 0}, 10)), ContainsSubstring("expected positive"));
  CHECK_THAT(error(metrics_of({1, 1}, 0)), ContainsSubstring("expected positive"));
  CHECK_THAT(error(metrics_of({1, std::nan("")}, 10)), ContainsSubstring("expected positive"));
  CHECK_THAT(error({{"step_seconds", "many"}}), ContainsSubstring("metrics of a run: "));
  CHECK_THAT(error(nullptr), ContainsSubstring("metrics of a run: "));
}

TEST_CASE("Efficiency is the speed-up per device", "[verdict]") {
  const SpeedUp gain = speed_up({.step_seconds = 0.5}, {.step_seconds = 1.5}, 4);
  CHECK(gain.factor == 3);
  CHECK(gain.efficiency == 0.75);
}

// --- Options as a command line -------------------------------------------------------------------

CommandLine parse(const ProgramInfo& program, const Words& words, Options& options) {
  std::vector<const char*> argv{"program"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  return *parse_command_line(program, options, int(argv.size()), argv.data());
}

CommandLine parse(const ProgramInfo& program, const Words& words) {
  Options options;
  return parse(program, words, options);
}

nlohmann::json all_of(const Options& options) {
  nlohmann::json values = options.to_json();
  values.update({{"metrics", options.metrics}, {"trace", options.trace}});
  return values;
}

/// Sets of options that go together; between them they change every option.
std::vector<Options> changed_options(const TempDir& folder) {
  Options a;
  a.data = "synthetic:20:10", a.data_dir = "-a folder's \"name\"", a.model = ModelKind::resnet18;
  a.width = 9, a.init = Initializer::normal, a.epochs = 3, a.max_steps = 7, a.batch_size = 65;
  a.lr = 0.1 + 0.2, a.scale_lr = 1e-7, a.warmup_epochs = 1.0 / 3, a.lr_step = 2;
  a.lr_gamma = 0.7, a.momentum = 0.9, a.weight_decay = 5e-4, a.seed = 4294967295;
  a.order = OrderKind::sampler, a.emulate = BatchSplit::from("micro:3"), a.devices = "cpu:1,cpu:0";
  a.threads_per_device = 2, a.tf32 = a.nchw = true, a.bind = true, a.workers = 3;
  a.prefetch_factor = 5, a.loader_timeout = 2.5, a.drop_last = true, a.log_interval = 9,
  a.load = "--here";
  a.metrics = folder / "m n", a.trace = folder / "t", a.save = folder / "s";
  Options b;
  b.graph = b.no_bind = true, b.workers = 0, b.data = "synthetic";
  b.devices = "sim:3", b.nodes = 2, b.optimizer = OptimizerKind::adamw, b.betas = {1.0 / 3, 0.98},
  b.eps = 1e-7, b.model = ModelKind::mlp, b.depth = 8;
  Options c;
  c.dropout = true, c.devices = "cpu:0", c.precision = Precision::fp16, c.growth_interval = 7;
  return {Options(), a, b, c};
}

TEST_CASE("Options survive as a command line, every one of them", "[verdict]") {
  const TempDir folder;
  const ProgramInfo stage{.name = "01-test", .summary = "-", .in_parts = true};
  const ProgramInfo other{.name = "06-test",
                          .summary = "-",
                          .in_parts = true,
                          .order = OrderKind::sampler,
                          .model = ModelKind::seed_bn,
                          .optimizer = OptimizerKind::adamw};
  const nlohmann::json defaults = all_of(Options());
  std::set<std::string> changed, shown;
  for (const Options& options : changed_options(folder)) {
    INFO(fmt::format("{}", fmt::join(options.arguments(), " ")));
    CHECK(parse(stage, options.arguments()).options == options);
    CHECK(parse(other, options.arguments()).options == options);  // not its own defaults
    const nlohmann::json values = all_of(options);
    for (const auto& [key, value] : values.items()) {
      const std::string name = "--" + std::regex_replace(key, std::regex("_"), "-");
      if (value != defaults.at(key)) changed.insert(name);
    }
  }
  const std::string help = run_help(stage_binary("01-single-gpu/reference")).out;
  const std::regex option(R"(\n (?:-\w, ?)?(--[a-z0-9-]+))");
  for (std::sregex_iterator it(help.begin(), help.end(), option), end; it != end; ++it) {
    if ((*it)[1] != "--help") shown.insert((*it)[1]);
  }
  CHECK(changed == shown);
}

TEST_CASE("A learning rate that is not given is the optimizer's, and --momentum chooses SGD",
          "[verdict]") {
  const ProgramInfo plain{.name = "01-test", .summary = "-"};
  const ProgramInfo adam{.name = "06-test", .summary = "-", .optimizer = OptimizerKind::adamw};
  using Words = std::vector<std::string>;
  for (const auto& [stage, words, optimizer, lr] :
       std::vector<std::tuple<ProgramInfo, Words, std::string, double>>{
           {plain, {}, "sgd", 0.1},
           {plain, {"--optimizer", "adam"}, "adam", 0.001},
           {plain, {"--optimizer", "adamw", "--lr", "0.1"}, "adamw", 0.1},
           {adam, {}, "adamw", 0.001},
           {adam, {"--optimizer", "sgd"}, "sgd", 0.1},
           {adam, {"--momentum", "0.9"}, "sgd", 0.1},
           {adam, {"--lr", "0.5"}, "adamw", 0.5}}) {
    const Options options = parse(stage, words).options;
    INFO(fmt::format("{} {}", stage.name, fmt::join(words, " ")));
    CHECK(name_of(options.optimizer) == optimizer);
    CHECK(options.lr == lr);
  }
}

TEST_CASE("A stage's own options are kept as they were typed, numbers without zeros before them",
          "[verdict]") {
  struct OwnOptions : Options {
    std::string text{}, unused = "x";
    int number = 0;
    bool on = false, off = true;
    std::vector<int> list{};

    void add_to(OptionParser& parser) override {
      Options::add_to(parser);
      parser.add("--text", text, "");
      parser.add("--unused", unused, "");
      parser.add("-n,--number", number, "");
      parser.add_flag("--on", on, "");
      parser.add_flag("--off,!--no-off", off, "");
      parser.add("--list", list, "");
    }
  };
  OwnOptions first, own;
  const ProgramInfo stage{.name = "02-test", .summary = "-", .baseline = "01-test"};
  const CommandLine typed = parse(stage,
                                  {"--text", "a b=c", "--lr", "0.5", "-n", "007", "--on",
                                   "--no-off", "--list", "1,2", "--baseline", "--order", "file"},
                                  first);
  CHECK(typed.baseline);
  CHECK(typed.own_arguments ==
        Words{"--text", "a b=c", "--number", "7", "--on=true", "--off=false", "--list", "1", "2"});
  const CommandLine again = parse(stage, typed.options.arguments() + typed.own_arguments, own);
  CHECK(again.options == typed.options);
  CHECK_FALSE(again.baseline);
  CHECK((own.text == "a b=c" && own.number == 7 && own.on && !own.off &&
         own.list == std::vector<int>{1, 2}));
}

TEST_CASE("Only the reference emulates, only the others have a baseline", "[verdict]") {
  const ProgramInfo reference{.name = "test", .summary = "-", .in_parts = true};
  const ProgramInfo first{.name = "01-test", .summary = "-"};
  const ProgramInfo second{.name = "02-test", .summary = "-", .baseline = "01-test"};
  const std::vector<std::string> emulate{"--emulate", "chunk:2"};
  const std::vector<std::string> no_epochs{"--baseline", "--epochs", "0"};
  CHECK(parse(reference, emulate).options.emulate.text() == "chunk:2");
  CHECK(error_of([&] { parse(first, emulate); }) ==
        "--emulate: 01-test has no such option; start: reference --emulate chunk:2");
  CHECK_THAT(error_of([&] { parse(first, {"--baseline"}); }), ContainsSubstring("--baseline"));
  CHECK(error_of([&] { parse(second, emulate); }) ==
        "--emulate: 02-test has no such option; start: ../01-test/reference --emulate chunk:2");
  CHECK(error_of([&] { parse(second, {"--graph"}); }) ==
        "--graph: 02-test has no such option; start: ../01-test/01-test --graph");
  CHECK_THAT(error_of([&] { parse(second, no_epochs); }), ContainsSubstring("--epochs 0"));
}

}  // namespace
}  // namespace lockstep
