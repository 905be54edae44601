// A stage that lets another program train: the tests of --baseline compare it with stage 01.

#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdlib>

#include "common/app/program.h"
#include "common/core/error.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  std::string trainer;
  std::vector<std::string> notes;
  bool global_batch_norm = false;
  const StageInfo stage{
      .name = "02-fake",
      .summary = "A stage for tests.",
      .add_options =
          [&](OptionParser& parser) {
            parser.add("--trainer", trainer, "program that trains, given the common options");
            parser.add("--note", notes, "handed to the trainer in $LOCKSTEP_TEST_NOTE");
            parser.add_flag("--global-batch-norm", global_batch_norm, "nothing to emulate");
          },
      .baseline = "01-single-gpu",
      .emulate =
          [&](size_t devices) {
            return global_batch_norm ? "none" : fmt::format("chunk:{}", devices);
          }};
  return run_program(stage, argc, argv, [&](const Options& options) {
    ::setenv("LOCKSTEP_TEST_NOTE", fmt::format("{}", fmt::join(notes, "|")).c_str(), 1);
    std::vector<std::string> words = options.arguments();
    words.insert(words.begin(), trainer);
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    ::execv(trainer.c_str(), pointers.data());
    fail<EnvironmentError>("--trainer: {} cannot be run; name a program", trainer);
  });
}
