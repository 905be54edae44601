// What is wrong with a command line is said in one line, before anything is read or written.

#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <span>

#include "tests/support/catch.h"
#include "tests/support/json.h"
#include "tests/support/refusals.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

struct NumericOption {
  std::string name, below, above, range;
};

const std::vector<NumericOption> kNumericOptions{
    {"--width", "0", "1025", "1 to 1024"},
    {"--depth", "0", "1025", "1 to 1024"},
    {"--seed", "-1", "4294967296", "0 to 4294967295"},
    {"--epochs", "-1", "100001", "0 to 100000"},
    {"--max-steps", "-1", "1000000001", "0 to 1000000000"},
    {"--batch-size", "0", "1000001", "1 to 1000000"},
    {"--lr", "-0.1", "nan", "0 to 1000000000000"},
    {"--scale-lr", "-1", "2e12", "0 to 1000000000000"},
    {"--warmup-epochs", "-1", "1001", "0 to 1000"},
    {"--lr-step", "-1", "100001", "0 to 100000"},
    {"--lr-gamma", "-0.1", "1.1", "0 to 1"},
    {"--momentum", "-0.1", "1.1", "0 to 1"},
    {"--weight-decay", "-1", "inf", "0 to 1000000000000"},
    {"--betas", "-0.1", "2", "0 to 1"},
    {"--eps", "0", "2", "1e-30 to 1"},
    {"--growth-interval", "0", "1000000001", "1 to 1000000000"},
    {"--threads-per-device", "0", "1025", "1 to 1024"},
    {"--nodes", "0", "65537", "1 to 65536"},
    {"--workers", "-1", "257", "0 to 256"},
    {"--prefetch-factor", "0", "1025", "1 to 1024"},
    {"--loader-timeout", "-1", "86401", "0 to 86400"},
    {"--log-interval", "0", "1000000001", "1 to 1000000000"},
};

TEST_CASE("A number out of its range is refused with value and range", "[faults]") {
  for (const NumericOption& option : kNumericOptions) {
    for (const std::string& value : {option.below, option.above, std::string("many")}) {
      INFO(option.name << " " << value);
      check_stage_refuses(kSmall + Words{option.name, value},
                          {option.name, "'" + value + "'", option.range});
    }
  }
}

TEST_CASE("An unknown option, name or device is refused", "[faults]") {
  check_stage_refuses(kSmall + Words{"--learning-rate", "0.1"}, {"--learning-rate", "--help"});
  check_stage_refuses(kSmall + Words{"stray"}, {"stray", "--help"});
  check_stage_refuses(kSmall + Words{"--clip-norm", "0.5"}, {"Not expected: --clip-norm 0.5;"});
  check_stage_refuses(kSmall + Words{"--lr"}, {"--lr"});
  check_stage_refuses(kSmall + Words{"--order", "--epochs", "1"},
                      {"--order", "'--epochs', an option, expected a value"});
  check_stage_refuses(kSmall + Words{"--metrics", ""}, {"--metrics", "an empty text"});
  check_stage_refuses({"--data", "imagenet"}, {"imagenet", "fashion-mnist"});
  check_stage_refuses({"--data", "synthetic:0:64"}, {"synthetic:0:64", "1 to 1000000"});
  check_stage_refuses(kSmall + Words{"--model", "vgg"}, {"vgg", "resnet18"});
  check_stage_refuses(kSmall + Words{"--order", "random"}, {"random", "sampler"});
  check_stage_refuses(kSmall + Words{"--init", "zero"}, {"zero", "kaiming"});
  check_stage_refuses(kSmall + Words{"--emulate", "chunk:0"}, {"chunk:0", "1 to 1024"}, {},
                      "01-single-gpu/reference");
  check_stage_refuses(kSmall + Words{"--graph", "--model", "seed-skip"}, {"--graph", "seed-skip"});
  check_stage_refuses(kSmall + Words{"--emulate", "chunk:2"},
                      {"--emulate", "/01-single-gpu/reference --emulate chunk:2"});
  check_stage_refuses(kSmall + Words{"--devices", "tpu:0"}, {"tpu:0"});
  check_stage_refuses(kSmall + Words{"--devices", "cpu:0,cuda:0"}, {"cpu:0 and cuda:0"});
  check_stage_refuses(kSmall + Words{"--load", "/nowhere/weights"},
                      {"/nowhere/weights", "No such file"});
}

TEST_CASE("Options of another optimizer, and betas that are no pair, are refused", "[faults]") {
  const auto refused = [](const Words& words, const Words& fragments) {
    check_stage_refuses(kSmall + words, fragments);
  };
  refused({"--optimizer", "lion"}, {"--optimizer: found 'lion', expected sgd, adam or adamw"});
  refused({"--betas", "0.9,0.99"}, {"--betas: is of adam and adamw, not of sgd"});
  refused({"--eps", "0.1"}, {"--eps: is of adam and adamw, not of sgd"});
  for (const std::string kind : {"adam", "adamw"}) {
    refused({"--optimizer", kind, "--momentum", "0.9"},
            {"--momentum: is of sgd, not of " + kind + ", whose --betas"});
  }
  for (const std::string betas : {"0.9", "1,0.9", "0.9,1.0", "0.9,0.99,0.999"}) {
    refused({"--optimizer", "adam", "--betas", betas},
            {"--betas: found ", "expected two numbers below 1, for instance 0.9,0.999"});
  }
  refused({"--optimizer", "adam", "--betas", "1.0,2"}, {"--betas", "'2'", "0 to 1"});
  refused({"--optimizer", "adam", "--betas", "0.9,high"}, {"--betas", "'high'", "0 to 1"});
}

TEST_CASE("A precision that a program does not have is refused, with what to do", "[faults]") {
  check_stage_refuses(kSmall + Words{"--precision", "half"}, {"--precision", "half", "bf16"});
  check_stage_refuses(kSmall + Words{"--growth-interval", "7"},
                      {"--growth-interval: 7 is for --precision fp16"});
  check_stage_refuses(kSmall + Words{"--precision", "bf16", "--growth-interval", "7"},
                      {"--growth-interval: 7 is for --precision fp16", "bf16"});
  check_stage_refuses(kSmall + Words{"--precision", "bf16", "--baseline"},
                      {"--baseline: compares weights, which bf16 rounds differently"}, {},
                      "04-ddp");
}

TEST_CASE("A factor of the learning rate without the epochs between is refused", "[faults]") {
  for (const Words& steps : {Words{}, {"--lr-step", "0"}}) {
    check_stage_refuses(
        kSmall + steps + Words{"--lr-gamma", "0.5"},
        {"--lr-gamma: 0.5 lowers the rate every --lr-step epochs", "give --lr-step 1 or more"});
  }
}

TEST_CASE("--help lists every option with its default", "[faults]") {
  const ProcessResult run = run_help(stage_binary("01-single-gpu"));
  CHECK(run.status == 0);
  CHECK(run.err.empty());
  for (const std::string fragment :
       {"--data TEXT=fashion-mnist", "--model {seed,seed-bn,seed-skip,mlp,resnet18}=seed",
        "--epochs", "=0.1\n", "--order {loader,sampler,file}=loader",
        "--dropout,--no-dropout{false}", "--metrics", "--trace", "--save", "--load", "--devices",
        "--data-dir", "--drop-last", "--init {kaiming,normal}=kaiming"}) {
    CHECK_THAT(run.out, ContainsSubstring(fragment));
  }
  // Every range that the help shows is tested above, and the other way round.
  const std::regex ranged(R"((--[a-z-]+) [A-Z]+:in (\S+ to [0-9]+)=)");
  std::set<std::pair<std::string, std::string>> shown, tested;
  for (std::sregex_iterator it(run.out.begin(), run.out.end(), ranged), end; it != end; ++it) {
    shown.emplace((*it)[1], (*it)[2]);
  }
  for (const NumericOption& option : kNumericOptions) tested.emplace(option.name, option.range);
  CHECK(shown == tested);
}

/// The options that a program's help lists, by their headings.
std::map<std::string, std::set<std::string>> groups_of(const std::string& program) {
  const std::string help = run_help(stage_binary(program)).out;
  const std::regex line(R"(\n(?:(\w+):(?=\n)| (?:-\w,)?(--[a-z0-9-]+)))");
  std::map<std::string, std::set<std::string>> groups;
  std::string heading;
  for (std::sregex_iterator it(help.begin(), help.end(), line), end; it != end; ++it) {
    if ((*it)[1].matched) {
      heading = (*it)[1];
    } else {
      groups[heading].insert((*it)[2]);
    }
  }
  return groups;
}

TEST_CASE("The help has every option in a group, a stage's own beside its like", "[faults]") {
  std::map<std::string, std::map<std::string, std::set<std::string>>> found;
  for (const std::string program :
       {"01-single-gpu", "01-single-gpu/reference", "02-dataparallel", "03-model-split",
        "03-model-split/tensor-split", "04-ddp", "05-syncbn-checkpoint", "06-fully-sharded"}) {
    INFO(program);
    auto groups = groups_of(program);
    std::erase_if(groups, [](const auto& group) {  // CLI11's own, whose name is its version's
      return group.second == std::set<std::string>{"--help"};
    });
    std::set<std::string> headings{"Data", "Network", "Training", "Devices", "Output"};
    if (program >= "03-model-split/") headings.insert("Ranks");
    if (program >= "06") headings.insert("Sharding");
    for (const auto& [heading, options] : groups) CHECK(headings.erase(heading) == 1);
    CHECK(headings.empty());
    found[program] = groups;
  }
  CHECK(found["01-single-gpu"]["Devices"].contains("--graph"));
  CHECK(found["01-single-gpu/reference"]["Devices"].contains("--emulate"));
  CHECK_FALSE(found["02-dataparallel"]["Devices"].contains("--reduce"));  // which it had once
  CHECK(found["03-model-split"]["Network"].contains("--split"));
  CHECK(found["03-model-split/tensor-split"]["Network"].contains("--layers"));
  CHECK(found["03-model-split/tensor-split"]["Ranks"].contains("--backend"));
  auto& last = found["05-syncbn-checkpoint"];
  CHECK(last["Data"].contains("--pad"));
  CHECK(last["Network"].contains("--no-sync-bn"));
  CHECK(last["Training"].contains("--accumulate"));
  CHECK(last["Ranks"].contains("--ddp"));
  CHECK(last["Ranks"].contains("--backend"));
  CHECK(last["Output"].contains("--checkpoint-dir"));
  auto& sharded = found["06-fully-sharded"];
  CHECK(sharded["Sharding"].contains("--unit"));
  CHECK(sharded["Ranks"].contains("--backend"));
  CHECK_FALSE(sharded["Ranks"].contains("--bucket-mb"));
}

TEST_CASE("An output that could not be written is refused before training", "[faults]") {
  const TempDir folder;
  const std::filesystem::path locked = folder / "locked";
  std::filesystem::create_directory(locked);
  std::filesystem::permissions(locked, std::filesystem::perms(0555));
  for (const std::string option : {"--metrics", "--trace", "--save"}) {
    INFO(option);
    const Words program = without_privileges() + Words{stage_binary("01-single-gpu")} + kSmall;
    const auto check = [&](const std::filesystem::path& path) {
      check_error_line(run_process(program + Words{option, path}, kDeadline),
                       {option, path.string()});
    };
    check(folder / "nowhere" / "file");
    check(folder.path());
    check(locked / "file");
  }
  CHECK(folder.names() == Words{"locked"});
}

TEST_CASE("An option that the network has no use for is refused, not ignored", "[faults]") {
  check_stage_refuses(kSmall + Words{"--model", "seed", "--width", "8"},
                      {"--width: 8", "resnet18"});
  check_stage_refuses(kSmall + Words{"--model", "resnet18", "--depth", "8"},
                      {"--depth: 8", "mlp", "resnet18"});
  check_stage_refuses(kSmall + Words{"--model", "resnet18", "--dropout"},
                      {"--dropout", "resnet18"});
}

TEST_CASE("Output that the system cannot find its way to is refused by option", "[faults]") {
  const TempDir folder;
  std::filesystem::create_symlink(folder / "loop", folder / "loop");
  const std::string loop = folder / "loop", longest(300, 'x');
  for (const std::string option : {"--metrics", "--save", "--trace"}) {
    check_error_line(run_stage01(kSmall + Words{option, loop}, kDeadline),
                     {option + " " + loop, "symbolic links"});
    check_error_line(run_stage01(kSmall + Words{option, longest}, kDeadline),
                     {option + " x", "expected at most 255"});
  }
}

TEST_CASE("Output that is no regular file is refused, not replaced", "[faults]") {
  for (const std::string option : {"--metrics", "--save", "--trace"}) {
    const ProcessResult run = run_stage01(kSmall + Words{option, "/dev/null"}, kDeadline);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err,
               ContainsSubstring(option + " /dev/null") && ContainsSubstring("not a regular file"));
    CHECK_THAT(run.out, !ContainsSubstring("Train Epoch"));
  }
}

TEST_CASE("A number is decimal", "[faults][options]") {
  for (const std::string word :
       {"0x10", "0b1", "1e1", "1.5", "1_000", "1'000", " 1", "1 ", "+-1", ""}) {
    INFO(word);
    check_stage_refuses(kSmall + Words{"--epochs", word},
                        {"--epochs", "'" + word + "'", "decimal"});
  }
  for (const std::string word : {"0x1p-3", "1d", "0,1", "1_0", "infinity"}) {
    INFO(word);
    check_stage_refuses(kSmall + Words{"--lr", word}, {"--lr", "'" + word + "'", "decimal"});
  }
  // 010 is ten, not eight.
  const TempDir folder;
  const ProcessResult run =
      run_stage01({"--data", "synthetic:64:16", "--batch-size", "010", "--max-steps", "+2", "--lr",
                   "1e-2", "--metrics", folder / "metrics"},
                  kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  const nlohmann::json metrics = read_json(folder / "metrics");
  CHECK(metrics.at("batch_size") == 10);
  CHECK(metrics.at("losses").size() == 2);
}

TEST_CASE("A flag is true or false, not what begins with a number", "[faults][options]") {
  for (const std::string name : {"--bind", "--drop-last", "--no-dropout", "--tf32", "--help"}) {
    for (const std::string value : {"1x", "0q", "2x", "2", "", "yes", "true "}) {
      check_stage_refuses(kSmall + Words{name + "=" + value},
                          {name, "found '" + value + "', expected true or false"});
    }
  }
  CHECK(run_stage01(kSmall + Words{"--bind=true", "--drop-last=false"}, kDeadline).status == 0);
}

TEST_CASE("No name in an error is an order to the terminal", "[faults][options]") {
  const TempDir folder;
  const std::string hostile = "\x1b[2J\x1b]0;title\a\x9b";
  const Words harmless{"\\x1b[2J\\x1b]0;title\\x07\\x9b"};
  check_stage_refuses(kSmall + Words{"--model", hostile}, harmless);
  check_stage_refuses(kSmall + Words{"--lr", hostile}, harmless);
  check_stage_refuses(kSmall + Words{hostile}, harmless);
  check_stage_refuses(kSmall + Words{"--load", folder / hostile}, harmless);
  check_stage_refuses(kSmall + Words{"--devices", hostile}, harmless);
  // A name within a file, and one that is printed where all is well.
  const std::vector<float> number{1};
  const std::vector<TensorEntry> entries{{.name = "fc1.\x1b[31mweight",
                                          .dtype = DType::F32,
                                          .shape = {1},
                                          .bytes = std::as_bytes(std::span(number))}};
  save_safetensors(folder / "file", entries);
  check_stage_refuses(kSmall + Words{"--load", folder / "file"}, {"fc1."});
  const std::string saved = folder / "\x1b[31mw";
  REQUIRE(run_stage01(kSmall + Words{"--save", saved}, kDeadline).status == 0);
  const ProcessResult run = run_stage01(kSmall + Words{"--load", saved}, kDeadline);
  CHECK(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("\\x1b[31mw"));
  CHECK(run.out.find('\x1b') == run.out.npos);
}

TEST_CASE("A warm-up that ends after the first decay is told", "[faults][options]") {
  const auto told = [](const std::string& epochs) {
    const ProcessResult run = run_stage01(
        kSmall + Words{"--warmup-epochs", epochs, "--lr-step", "1", "--lr-gamma", "0.5"},
        kDeadline);
    CHECK(run.status == 0);
    return run.err;
  };
  CHECK(told("0.5").empty());
  CHECK(told("1").starts_with("warning: --warmup-epochs 1 ends where --lr-step 1 has lowered"));
  CHECK_THAT(told("2.5"), ContainsSubstring("drops there at once, to 0.25 of it"));
}

TEST_CASE("A text is not empty", "[faults][options]") {
  for (const std::string option : {"--data", "--data-dir", "--model", "--init", "--load", "--save",
                                   "--metrics", "--trace", "--devices", "--order"}) {
    INFO(option);
    check_error_line(run_stage01(kSmall + Words{option, ""}, kDeadline), {option, "empty"});
    check_error_line(run_stage01(kSmall + Words{option + "="}, kDeadline), {option});
  }
  for (const std::string option : {"--checkpoint-dir", "--resume", "--backend", "--init-method"}) {
    INFO(option);
    check_error_line(
        run_process(Words{stage_binary("05-syncbn-checkpoint")} + kSmall + Words{option, ""},
                    kDeadline),
        {option, "empty"});
  }
  for (const std::string option : {"--split", "--schedule"}) {
    INFO(option);
    check_error_line(
        run_process(Words{stage_binary("03-model-split")} + kSmall + Words{option, ""}, kDeadline),
        {option, "empty"});
  }
}

TEST_CASE("Two outputs are not one file, whatever name it has", "[faults][options]") {
  const TempDir folder;
  std::filesystem::create_directory(folder / "real");
  std::filesystem::create_symlink(folder / "real", folder / "link");
  write_file(folder / "old", std::string("old"));
  std::filesystem::create_symlink(folder / "old", folder / "soft");
  std::filesystem::create_hard_link(folder / "old", folder / "hard");
  const Words names = folder.names();
  const auto check = [&](const std::string& stage, const std::string& first,
                         const std::filesystem::path& a, const std::string& second,
                         const std::filesystem::path& b) {
    INFO(a << " " << b);
    check_error_line(
        run_process(Words{stage_binary(stage)} + kSmall + Words{first, a, second, b}, kDeadline),
        {first, a.string(), second, b.string(), "the same file", "name two"});
  };
  const std::string outputs[] = {"--save", "--metrics", "--trace"};
  for (int i = 0; i < 3; ++i) {
    check("01-single-gpu", outputs[i], folder / "w", outputs[(i + 1) % 3], folder / "w");
  }
  check("01-single-gpu", "--save", folder / "w", "--trace", folder / "real/../w");
  check("01-single-gpu", "--save", folder / "real/w", "--trace", folder / "link/w");
  check("01-single-gpu", "--save", folder / "old", "--trace", folder / "soft");
  check("01-single-gpu", "--save", folder / "hard", "--trace", folder / "old");
  check("05-syncbn-checkpoint", "--checkpoint-dir", folder / "w", "--save", folder / "w");
  for (const std::string end : {"w/", "w/.", "./w//"}) {
    check("05-syncbn-checkpoint", "--checkpoint-dir", folder / end, "--trace", folder / "w");
  }
  // Weights may go where they came from, other things may not.
  check("01-single-gpu", "--load", folder / "old", "--metrics", folder / "soft");
  check("01-single-gpu", "--load", folder / "old", "--trace", folder / "old");
  CHECK(folder.names() == names);
}

TEST_CASE("No output lies among the checkpoints, which come and go", "[faults][options]") {
  const TempDir folder;
  std::filesystem::create_directory(folder / "checkpoints");
  std::filesystem::create_symlink(folder / "checkpoints", folder / "link");
  for (const std::string option : {"--save", "--metrics", "--trace"}) {
    for (const std::string place : {"checkpoints", "link", "checkpoints/../link"}) {
      const std::string path = folder / place / "step-000000010.safetensors";
      check_error_line(
          run_process(Words{stage_binary("05-syncbn-checkpoint")} + kSmall +
                          Words{"--checkpoint-dir", folder / "checkpoints", option, path},
                      kDeadline),
          {option + " " + path, "lies in --checkpoint-dir", "name another"});
    }
  }
}

TEST_CASE("A file that may not grow is an error of its option, and nothing stays of it",
          "[faults][options]") {
  const TempDir folder;
  for (const std::string stage : {"01-single-gpu", "05-syncbn-checkpoint"}) {
    const ProcessResult run =
        run_process(Words{"bash", "-c", "ulimit -f 1; exec \"$@\"", "sh", stage_binary(stage)} +
                        kSmall + Words{"--max-steps", "1", "--save", folder / "w"},
                    kDeadline);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("error: cannot save") && ContainsSubstring("too large"));
  }
  CHECK(folder.names() == Words{});
}

TEST_CASE("Statistics of which each rank has its own are not half saved", "[faults][options]") {
  const TempDir folder;
  const Words each = {"--no-sync-bn", "--no-broadcast-buffers"};
  const Words checkpoints{"--checkpoint-dir", folder / "c"}, resumed{"--resume", folder / "c"};
  for (const Words& use : {checkpoints, resumed}) {
    check_error_line(
        run_process(Words{stage_binary("05-syncbn-checkpoint")} + kSmall + each + use, kDeadline),
        {each[0], each[1], "leave out one of them"});
  }
  CHECK(folder.names() == Words{});
}

TEST_CASE("No output has the name of another rank's", "[faults][options]") {
  const TempDir folder;
  const std::string trace = folder / "t";
  for (const std::string option : {"--save", "--metrics", "--checkpoint-dir"}) {
    for (const std::string other : {"t.rank1", "./t.rank12"}) {
      const std::string path = folder / other;
      check_error_line(run_process(Words{stage_binary("05-syncbn-checkpoint")} + kSmall +
                                       Words{"--trace", trace, option, path},
                                   kDeadline),
                       {"--trace " + trace, option + " " + path, "a further rank's file"});
    }
  }
  CHECK(folder.names() == Words{});
  for (const std::string other : {"t.rank", "t.rank1x", "trank1", "u.rank1", "1"}) {
    INFO(other);
    CHECK(
        run_stage01(kSmall + Words{"--max-steps", "1", "--trace", trace, "--save", folder / other},
                    kDeadline)
            .status == 0);
  }
}

TEST_CASE("A stage of one process refuses to be several", "[faults][options]") {
  const auto started = [](const Words& variables, const std::string& stage, const Words& options) {
    return run_process(Words{"env"} + variables + Words{stage_binary(stage)} + kSmall + options,
                       kDeadline);
  };
  const TempDir folder;
  const Words saves{"--save", folder / "w"};
  for (const std::string stage : {"01-single-gpu", "02-dataparallel", "03-model-split"}) {
    for (const auto& [variables, named] : std::vector<std::pair<Words, std::string>>{
             {{"RANK=1", "WORLD_SIZE=2"}, "WORLD_SIZE=2"},
             {{"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=3"}, "OMPI_COMM_WORLD_SIZE=3"},
             {{"PMI_RANK=0", "PMI_SIZE=2"}, "PMI_SIZE=2"},
             {{"FLUX_TASK_RANK=0"}, "FLUX_TASK_RANK=0"}}) {
      check_error_line(started(variables, stage, saves), {stage + " is one process", named});
    }
  }
  CHECK(folder.names() == Words{});
  const Words last{"--max-steps", "1"};
  for (const Words& alone : std::vector<Words>{{"RANK=0", "WORLD_SIZE=1"},
                                               {"MASTER_ADDR=host", "MASTER_PORT=1"},
                                               {"WORLD_SIZE=2"},
                                               {"SLURM_PROCID=0", "SLURM_NTASKS=2"}}) {
    CHECK(started(alone, "01-single-gpu", last).status == 0);
  }
}

}  // namespace
}  // namespace lockstep
