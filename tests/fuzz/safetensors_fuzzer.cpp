// Coverage-guided fuzzing of the readers of safetensors files and of training states with
// libFuzzer; needs clang, so it is no part of the build. From the repository root:
//
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I. common/core/text.cpp
//       common/io/*.cpp 05-syncbn-checkpoint/training_state.cpp
//       tests/fuzz/safetensors_fuzzer.cpp -lfmt -lz -o safetensors_fuzzer       (one line)
//   ./safetensors_fuzzer -max_total_time=300 -max_len=4096 corpus/
//
// The folder corpus/ may be empty. clang++ comes with Debian's packages clang and, on Debian 12,
// libclang-rt-14-dev (on 13: libclang-rt-19-dev).
// It stops at any outcome but the two that tests/support/safetensors_support.h and
// training_state_support.h describe.

#include "tests/support/safetensors_support.h"
#include "tests/support/training_state_support.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  lockstep::testing::io::check_parser(bytes);
  lockstep::testing::check_training_state(bytes);
  return 0;
}
