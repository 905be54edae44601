// A stage that lets another program train: the tests of --baseline compare it with stage 01.

#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdlib>

#include "common/core/error.h"
#include "common/training/program.h"

namespace lockstep {
namespace {

struct FakeOptions : Options {
  std::string trainer;
  std::vector<std::string> notes;
  bool global_batch_norm = false;

  void add_to(OptionParser& parser) override {
    Options::add_to(parser);
    parser.add("--trainer", trainer, "program that trains, given the common options");
    parser.add("--note", notes, "handed to the trainer in $LOCKSTEP_TEST_NOTE");
    parser.add_flag("--global-batch-norm", global_batch_norm, "nothing to emulate");
  }
};

void let_train(const FakeOptions& options) {
  ::setenv("LOCKSTEP_TEST_NOTE", fmt::format("{}", fmt::join(options.notes, "|")).c_str(), 1);
  std::vector<std::string> words = options.arguments();
  words.insert(words.begin(), options.trainer);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(options.trainer.c_str(), pointers.data());
  fail<EnvironmentError>("--trainer: {} cannot be run; name a program", options.trainer);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::FakeOptions options;
  return lockstep::run_program(
      {.name = "02-fake",
       .summary = "A stage for tests.",
       .baseline = "01-single-gpu",
       .emulate =
           [&](size_t devices) {
             return options.global_batch_norm ? "none" : fmt::format("chunk:{}", devices);
           }},
      options, argc, argv, [&] { lockstep::let_train(options); });
}
