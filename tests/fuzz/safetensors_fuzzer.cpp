// Coverage-guided fuzzing of the safetensors parser with libFuzzer; needs clang, so it is no part
// of the build. From the repository root:
//
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I. common/io/*.cpp
//       tests/fuzz/safetensors_fuzzer.cpp -lfmt -o safetensors_fuzzer       (one line)
//   ./safetensors_fuzzer -max_total_time=300 -max_len=4096 corpus/          (an empty folder will
//   do)
//
// It stops at any outcome but the two that tests/support/safetensors_support.h describes.

#include "tests/support/safetensors_support.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  lockstep::testing::io::check_parser({reinterpret_cast<const char*>(data), size});
  return 0;
}
