// oneDNN writes nothing past the memory that it asks for.

#include "tests/support/catch.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

/// Strided 1x1 convolutions in guarded memory, with the instructions of `isa` at most.
void check_guarded(const std::string& isa) {
  for (const std::string threads : {"1", "2", "4"}) {
    if (threads == "2" && !full_campaign()) continue;
    Words words{build_dir() + "/tests/unit/guarded-convolutions", threads};
    if (full_campaign()) words.push_back("all");
    const ProcessResult run =
        run_process(words, 600, {{"ONEDNN_MAX_CPU_ISA", isa}, {"OMP_WAIT_POLICY", "passive"}});
    INFO(isa << ", " << story(run));
    CHECK(run.status == 0);
    CHECK(run.out == (full_campaign() ? "1440 shapes computed\n" : "36 shapes computed\n"));
  }
}

TEST_CASE("Strided 1x1 convolutions of few channels stay within their memory: AVX2", "[kernels]") {
  check_guarded("AVX2");
}

TEST_CASE("Strided 1x1 convolutions of few channels stay within their memory: AVX-512",
          "[kernels]") {
  if (!__builtin_cpu_supports("avx512f")) LOCKSTEP_SKIP("no AVX-512");
  check_guarded("DEFAULT");
}

}  // namespace
}  // namespace lockstep
