// What stages 01, 02 and 03 do with wrong data, devices and options: one clear line, a status, and
// nothing left over.

#include <unistd.h>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/json.h"
#include "tests/support/refusals.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

// --- Data sets -----------------------------------------------------------------------------------

constexpr uint32_t kTrain = 70, kTest = 30;

/// Four good files; each test damages one.
struct DataFiles {
  DataFiles() {
    for (const auto& [part, count] : {std::pair("train", kTrain), std::pair("t10k", kTest)}) {
      const size_t pixels = size_t{count} * 28 * 28;
      files[std::string(part) + "-images-idx3-ubyte"] =
          idx_bytes(2051, {count, 28, 28}, counting(pixels, 251));
      files[std::string(part) + "-labels-idx1-ubyte"] = idx_labels(count);
    }
  }
  Bytes& operator[](const std::string& name) { return files.at(name); }
  void rename(const std::string& from, const std::string& to) {
    auto node = files.extract(from);
    node.key() = to;
    files.insert(std::move(node));
  }
  void write(const std::filesystem::path& folder) const {
    for (const auto& [name, bytes] : files) write_file(folder / name, bytes);
  }
  std::map<std::string, Bytes> files;
};

const std::string kImages = "train-images-idx3-ubyte";
const std::string kLabels = "train-labels-idx1-ubyte";

void check_data_refused(const DataFiles& data, const Words& fragments, const Words& more = {}) {
  const TempDir folder;
  data.write(folder.path());
  check_stage_refuses(Words{"--data-dir", folder.path()} + more, fragments);
}

TEST_CASE("Good files train", "[faults]") {
  const TempDir folder;
  DataFiles().write(folder.path());
  const ProcessResult run = run_stage01({"--data-dir", folder.path()}, kDeadline);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("70 training and 30 test images of 28x28x1"));
}

TEST_CASE("A wrong magic number is refused", "[faults][row2]") {
  DataFiles images, labels;
  images[kImages][3] = 1;
  check_data_refused(images, {kImages, "2049", "2051"});
  labels["t10k-labels-idx1-ubyte"][3] = 3;
  check_data_refused(labels, {"t10k-labels-idx1-ubyte", "2051", "2049"});
}

TEST_CASE("A truncated file is refused with both sizes", "[faults][row3]") {
  DataFiles data;
  data[kImages].resize(data[kImages].size() - 1);
  check_data_refused(data, {kImages, "54895", "54896", "truncated"});
}

TEST_CASE("Trailing bytes are refused", "[faults][row4]") {
  DataFiles data;
  data[kImages].push_back(0);
  check_data_refused(data, {kImages, "54897", "54896", "too long"});
}

TEST_CASE("Another number of labels than images is refused with both", "[faults][row5]") {
  DataFiles data;
  data[kLabels] = idx_labels(71);
  check_data_refused(data, {kImages, kLabels, "70 images", "71 labels"});
}

TEST_CASE("A label beyond the classes is refused with index and value", "[faults][row6]") {
  for (const int label : {10, 255}) {
    DataFiles data;
    data[kLabels][8 + 42] = static_cast<uint8_t>(label);
    check_data_refused(data, {kLabels, fmt::format("label {}", label), "index 42", "0 to 9"});
  }
}

TEST_CASE("A header that promises 2^31 images is refused before memory is asked for",
          "[faults][row7]") {
  DataFiles data;
  data[kImages] = idx_bytes(2051, {0x80000000u, 28, 28}, counting(100, 251));
  check_data_refused(data, {kImages, "2147483648 x 28 x 28", "truncated"});
  data.rename(kImages, kImages + ".gz");
  data[kImages + ".gz"] = gzip(data[kImages + ".gz"]);
  check_data_refused(data, {kImages + ".gz", "2147483648 x 28 x 28"});
}

TEST_CASE("A damaged gzip file is refused", "[faults][row8]") {
  DataFiles whole, cut, wrong;
  for (DataFiles* data : {&whole, &cut, &wrong}) {
    (*data)[kImages] = gzip((*data)[kImages]);
    data->rename(kImages, kImages + ".gz");
  }
  Bytes& truncated = cut[kImages + ".gz"];
  truncated.resize(truncated.size() - 20);
  check_data_refused(cut, {kImages + ".gz", "truncated"});
  Bytes& checksum = wrong[kImages + ".gz"];
  checksum[checksum.size() - 8] ^= 1;
  check_data_refused(wrong, {kImages + ".gz"});

  const TempDir folder;
  whole.write(folder.path());
  CHECK(run_stage01({"--data-dir", folder.path()}, kDeadline).status == 0);
}

TEST_CASE("Missing data is one line that says how to get it", "[faults][row9]") {
  const TempDir folder;
  const Words advice{"./lockstep data fashion-mnist", "--data synthetic"};
  check_stage_refuses({"--data-dir", folder / "nowhere"},
                      advice + Words{(folder / "nowhere").string()});
  check_stage_refuses({"--data-dir", folder.path()},
                      advice + Words{folder.path().string(), kImages});
  DataFiles data;
  data.files.erase(kLabels);
  check_data_refused(data, advice + Words{kLabels, "missing"});
  check_stage_refuses({"--data", "cifar10", "--data-dir", folder.path()},
                      {"./lockstep data cifar10"});

  DataFiles().write(folder.path());
  std::filesystem::permissions(folder / kImages, std::filesystem::perms::none);
  check_stage_refuses({"--data-dir", folder.path()}, {kImages, "ermission"}, without_privileges());
}

TEST_CASE("An epoch without batches is refused", "[faults][row10]") {
  DataFiles data;
  data[kImages] = idx_bytes(2051, {0, 28, 28}, {});
  data[kLabels] = idx_labels(0);
  check_data_refused(data, {"0 batches"});
  check_data_refused(DataFiles(), {"0 batches", "71"}, {"--drop-last", "--batch-size", "71"});
}

TEST_CASE("Arguments of the loader are refused with their value", "[faults][row25]") {
  check_stage_refuses(kSmall + Words{"--batch-size", "0"}, {"--batch-size", "'0'", "1 to 1000000"});
  check_stage_refuses(kSmall + Words{"--workers", "-1"}, {"--workers", "'-1'", "0 to 256"});
  check_stage_refuses(kSmall + Words{"--loader-timeout", "-0.5"}, {"--loader-timeout", "'-0.5'"});
  check_stage_refuses(kSmall + Words{"--workers", "0", "--loader-timeout", "3"},
                      {"--loader-timeout", "3", "--workers 1"});
  check_stage_refuses(kSmall + Words{"--prefetch-factor", "0"},
                      {"--prefetch-factor", "'0'", "1 to"});
  check_stage_refuses(kSmall + Words{"--workers", "0", "--prefetch-factor", "3"},
                      {"--prefetch-factor", "3", "--workers 1"});
}

TEST_CASE("A GPU that is not there is refused, and by default a run says that it has none",
          "[faults][row128]") {
  const std::vector<std::pair<std::string, std::string>> no_gpu{{"CUDA_VISIBLE_DEVICES", ""}};
  const Words program = Words{stage_binary("01-single-gpu")} + kSmall;
  check_error_line(run_process(program + Words{"--devices", "cuda:0"}, kDeadline, no_gpu),
                   {"cuda:0", "--devices cpu:0"});

  const ProcessResult run = run_process(program, kDeadline, no_gpu);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK(run.err.empty());
  CHECK_THAT(run.out, ContainsSubstring("seed on cpu:0"));
  CHECK_THAT(run.out, ContainsSubstring("(no GPU: "));
}

// --- Stage 02 ------------------------------------------------------------------------------------

void check_refused_by_stage02(const Words& options, const Words& fragments) {
  check_stage_refuses(options, fragments, {}, "02-dataparallel");
}

TEST_CASE("Stage 02 refuses what it cannot do, and devices that are none",
          "[faults][dataparallel][row40]") {
  for (const Words& reduce : {Words{"--reduce", "library"}, Words{"--reduce"}}) {
    check_refused_by_stage02(
        kSmall + reduce, {"--reduce: 02-dataparallel has no such option; DataParallel makes its "
                          "own copies and sums; for a library's reduction start 04-ddp "
                          "--all-reduce library"});
  }
  check_refused_by_stage02(kSmall + Words{"--graph"}, {"--graph"});
  check_refused_by_stage02(kSmall + Words{"--emulate", "chunk:2"}, {"--emulate"});
  check_refused_by_stage02(kSmall + Words{"--devices", "cpu:0,cuda:0"}, {"cpu:0 and cuda:0"});
  check_refused_by_stage02(kSmall + Words{"--devices", "cpu:0,,cpu:1"}, {"--devices"});
  check_refused_by_stage02(kSmall + Words{"--devices", "cpu:0,tpu:1"}, {"tpu:1"});
}

TEST_CASE("Stage 02 refuses broken data and weights", "[faults][dataparallel][row3]") {
  DataFiles data;
  data[kImages].resize(data[kImages].size() - 1);
  const TempDir folder;
  data.write(folder.path());
  check_refused_by_stage02({"--data-dir", folder.path()}, {kImages, "54895", "54896", "truncated"});
  check_refused_by_stage02(kSmall + Words{"--load", "/nowhere/weights"},
                           {"/nowhere/weights", "No such file"});
}

// --- Stage 03 ------------------------------------------------------------------------------------

TEST_CASE("Stage 03 refuses splits and schedules that cannot be", "[faults][pipeline][row48]") {
  const auto check = [](const Words& options, const Words& fragments) {
    check_stage_refuses(kSmall + options, fragments, {}, "03-model-split");
  };
  check({"--schedule", "pipedream"},
        {"--schedule", "'pipedream'", "naive, gpipe, 1f1b or interleaved"});
  check({"--schedule", "naive", "--micro-batches", "4"}, {"naive", "4", "gpipe or 1f1b"});
  check({"--chunks", "2"}, {"1f1b has 1 chunk", "found 2", "choose interleaved"});
  const Words interleaved{"--schedule", "interleaved", "--devices", "cpu:0,cpu:1,cpu:2"};
  check(interleaved + Words{"--micro-batches", "4"},
        {"3 devices", "4 micro-batches", "--micro-batches 6, or choose 1f1b"});
  check(interleaved + Words{"--chunks", "1"}, {"1 chunk", "expected 2 or more", "choose 1f1b"});
  check(interleaved + Words{"--chunks", "3"}, {"9 stages of 8 layers", "fewer --chunks"});
  check(interleaved + Words{"--split", "2,4"}, {"2,4 makes 3 stages", "3 and each has 2 --chunks"});
  check({"--micro-batches", "-1"}, {"--micro-batches"});
  check({"--split", "sideways"}, {"--split", "'sideways'", "auto, measured, parameters"});
  check({"--split", "2,2", "--devices", "cpu:0,cpu:1,cpu:2"}, {"--split", "2,2", "1 to 7"});
  check({"--split", "2,4", "--devices", "cpu:0,cpu:1"}, {"3 stages", "--devices names 2"});
  check({"--devices", "cpu:0,cpu:1,cpu:2,cpu:3,cpu:4,cpu:5,cpu:6,cpu:7,cpu:8"},
        {"--split", "9 stages of 8 layers"});
  // 64 images in batches of 30 leave a last one of 4.
  check_stage_refuses({"--data", "synthetic:64:16", "--batch-size", "30", "--micro-batches", "5"},
                      {"--micro-batches", "5", "4 samples"}, {}, "03-model-split");
  check({"--emulate", "chunk:2"}, {"--emulate"});
  check({"--tensor-split", "conv2", "fc1"},
        {"--tensor-split", "/03-model-split/tensor-split --layers conv2,fc1"});
}

TEST_CASE("Stage 03 refuses to split layers that do not divide", "[faults][tensorsplit][row55]") {
  const auto check = [](const Words& options, const Words& fragments) {
    check_stage_refuses(kSmall + options, fragments, {}, "03-model-split/tensor-split");
  };
  check({"--layers", "conv2", "--devices", "cpu:0,cpu:1,cpu:2"}, {"conv2", "20", "3"});
  check({"--layers", "fc2"}, {"--layers", "'fc2'", "conv2, fc1"});
  check({"--layers", "conv2,fc1,conv2"}, {"--layers", "found 'conv2' twice", "once"});
  check({"--devices", "cpu:0,cpu:1,cpu:2"}, {"--layers auto: no layer", "3 ranks", "fc1 has 320"});
  check({"--emulate", "chunk:2"}, {"--emulate"});
  check({"--schedule", "1f1b"}, {"--schedule"});  // is the pipeline's
}

TEST_CASE("What ranks that share layers find is said once, and nothing is saved",
          "[faults][tensorsplit][row89]") {
  const TempDir folder;
  const auto check = [&](const Words& options, const std::string& line) {
    const ProcessResult run =
        run_process(Words{stage_binary("03-model-split/tensor-split"), "--devices", "cpu:0,cpu:1",
                          "--save", folder / "weights"} +
                        options,
                    kDeadline);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(line));
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK_FALSE(std::filesystem::exists(folder / "weights"));
  };
  check(kSmall + Words{"--lr", "1e12"}, "step 1, rank 0 (cpu:0), rank 1 (cpu:1): the loss");
  check({"--data", "synthetic:64:16", "--batch-size", "65", "--drop-last"}, "0 batches");
  check(kSmall + Words{"--load", folder / "nowhere"}, "nowhere");
}

TEST_CASE("Ranks that would share layers differently are told so, once",
          "[faults][tensorsplit][row86]") {
  const std::string script =
      "case $RANK in 0) exec \"$0\" \"$@\" --layers fc1;; *) exec \"$0\" \"$@\";; esac";
  const ProcessResult run =
      run_process(Words{build_dir() + "/common/launch/launch", "--nproc-per-node", "2", "sh", "-c",
                        script, stage_binary("03-model-split/tensor-split")} +
                      kSmall,
                  kDeadline);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("layers: rank 0 has \"fc1\", rank 1 has \"auto\""));
  CHECK(std::ranges::count(run.err, '\n') == 1);
}

TEST_CASE("Devices keep to their cores or they do not", "[faults][dataparallel]") {
  check_stage_refuses({"--bind", "--no-bind"}, {"--bind", "--no-bind", "leave one"}, {},
                      "02-dataparallel");
}

TEST_CASE("Stage 03 draws its timetable without devices or data", "[faults][pipeline]") {
  const ProcessResult run =
      run_process({stage_binary("03-model-split"), "--print-schedule", "--devices", "cpu:0,cpu:1",
                   "--micro-batches", "2", "--data-dir", "/nowhere"},
                  kDeadline);
  INFO(story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("1f1b, 2 stages, 2 micro-batches\nstage 0  F0 F1"));
}

TEST_CASE("The lesson's timetables are those of the program", "[faults][pipeline]") {
  const std::string lesson = read_text(LOCKSTEP_SOURCE "/03-model-split/pipeline/README.md");
  for (const Words& options : {Words{"naive", "1", "cpu:0,cpu:1,cpu:2,cpu:3"},
                               {"gpipe", "4", "cpu:0,cpu:1,cpu:2"},
                               {"1f1b", "4", "cpu:0,cpu:1,cpu:2"},
                               {"interleaved", "2", "cpu:0,cpu:1"}}) {
    const ProcessResult run =
        run_process({stage_binary("03-model-split"), "--print-schedule", "--schedule", options[0],
                     "--micro-batches", options[1], "--devices", options[2]},
                    kDeadline);
    INFO(story(run));
    REQUIRE(run.status == 0);
    const size_t begin = run.out.find('\n') + 1, end = run.out.find("bubble");
    REQUIRE(end > begin);
    CHECK_THAT(lesson, ContainsSubstring(run.out.substr(begin, end - begin)));
  }
}

TEST_CASE("Stage 03 has no timetable to compare with stage 01", "[faults][pipeline]") {
  check_stage_refuses({"--print-schedule", "--baseline"},
                      {"--print-schedule", "--baseline", "leave one"}, {}, "03-model-split");
}

TEST_CASE("The program of equal layers measures what it says, beside the formula",
          "[faults][pipeline]") {
  const TempDir folder;
  const auto bubble = [&](const Words& options) {
    return run_process(Words{stage_binary("03-model-split/bubble")} + options, kDeadline);
  };
  const ProcessResult run =
      bubble({"--stages", "1,2", "--micro-batches", "1,2", "--schedules", "naive,1f1b,interleaved",
              "--sleep", "4", "--steps", "2", "--metrics", folder / "rows"});
  INFO(story(run));
  REQUIRE(run.status == 0);
  const nlohmann::json rows = nlohmann::json::parse(read_text(folder / "rows"));
  // The naive schedule has one micro-batch, the interleaved one needs two devices and a multiple.
  REQUIRE(rows.size() == 7);
  for (const auto& row : rows) {
    const double p = row["stages"], m = row["micro_batches"], v = row["chunks"];
    CHECK(v == (row["schedule"] == "interleaved" ? 2 : 1));
    CHECK(double(row["bubble"]["predicted"]) == Approx((p - 1) / (v * m + p - 1)));
    CHECK((row["bubble"]["measured"] >= 0.0 && row["bubble"]["measured"] < 1.0));
    CHECK(row["peak_memory_bytes"].size() == size_t(p));
    // Eight layers of 4 ms and of 8 ms, of which stages overlap all but the bubble.
    CHECK(double(row["step_seconds"]) >= 0.99 * 8 * 0.012 * (v * m + p - 1) / (v * m * p));
  }
  const auto refused = [&](const Words& options, const std::string& fragment) {
    const ProcessResult bad = bubble(options);
    INFO(story(bad));
    CHECK(bad.status == 1);
    CHECK_THAT(bad.err, Catch::Matchers::StartsWith("error: ") && ContainsSubstring(fragment));
    CHECK(bad.err.find('\n') == bad.err.size() - 1);
  };
  refused({"--stages", "4"}, "--stages: 4 of the 2 devices in --devices cpu:0,cpu:1");
  refused({"--stages", "3"}, "--stages: 3 cannot have equally many of 8 layers");
  refused({"--schedules", "pipedream"}, "--schedules: found 'pipedream'");
  refused({"--schedules", "interleaved", "--micro-batches", "3"}, "none is possible");
  refused({"--sleep", "-1"}, "--sleep");
  refused({"--trace", folder / "trace"}, "--trace: draws one pipeline, found 26; give one");
  refused({"--metrics", "/nowhere/rows"}, "--metrics /nowhere/rows");
}

TEST_CASE("Stage 02 stops at the step whose loss is not finite", "[faults][dataparallel][row18]") {
  const TempDir folder;
  const Words program{stage_binary("02-dataparallel"), "--devices", "cpu:0,cpu:1"};
  const ProcessResult run =
      run_process(program + kSmall + Words{"--lr", "1e6", "--save", folder / "weights"}, kDeadline);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK(run.err.find('\n') == run.err.size() - 1);
  CHECK_THAT(run.err, ContainsSubstring("not finite"));
  CHECK(folder.names() == Words{});
}

}  // namespace
}  // namespace lockstep
