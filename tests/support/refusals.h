#pragma once
// Runs of a stage that are refused: one clear line, a status, and nothing left behind.

#include <unistd.h>

#include <string>

#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/stage.h"

namespace lockstep::testing {

/// Eight steps of eight samples: cheap even under a sanitizer.
inline const Words kSmall{"--data", "synthetic:64:16", "--batch-size", "8"};

/// Words before a command; started with them, even root needs permission from the file system.
inline Words without_privileges() {
  if (::geteuid() != 0) return {};
  return {"setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps",
          "-dac_override,-dac_read_search"};
}

/// Checks for one line on stderr that names all of `fragments`, status 1, and no training.
inline void check_error_line(const ProcessResult& run, const Words& fragments) {
  INFO(story(run));
  CHECK_FALSE(run.timed_out);
  CHECK(run.status == 1);
  CHECK(run.err.starts_with("error: "));
  CHECK(run.err.find('\n') == run.err.size() - 1);
  for (const std::string& fragment : fragments)
    CHECK_THAT(run.err, Catch::Matchers::ContainsSubstring(fragment));
  CHECK_THAT(run.out, !Catch::Matchers::ContainsSubstring("Train Epoch"));
  CHECK_THAT(run.out, !Catch::Matchers::ContainsSubstring("Test set"));
}

/// Checks that a stage refuses these options before it trains and before it writes anything.
inline void check_stage_refuses(const Words& options, const Words& fragments,
                                const Words& prefix = {},
                                const std::string& stage = "01-single-gpu") {
  const TempDir results;
  const Words outputs{"--metrics", results / "metrics", "--trace", results / "trace",
                      "--save",    results / "weights"};
  check_error_line(run_process(prefix + Words{stage_binary(stage)} + outputs + options, kDeadline),
                   fragments);
  CHECK(results.names() == Words{});
}

}  // namespace lockstep::testing
