// Coverage-guided fuzzing of what join-weights and a run that resumes read of a sharded checkpoint:
// the index, the shards' texts, and which elements they have. Like safetensors_fuzzer.cpp it needs
// clang. From the repository root:
//
//   clang++ -std=c++20 -g -O1 -fopenmp -fsanitize=fuzzer,address,undefined -I. common/core/*.cpp
//       common/io/*.cpp common/kernels/geometry.cpp common/nn/*.cpp
//       common/training/weights_file.cpp 05-syncbn-checkpoint/checkpoint.cpp
//       05-syncbn-checkpoint/training_state.cpp 06-fully-sharded/shards.cpp
//       06-fully-sharded/sharded_checkpoint.cpp
//       tests/support/process.cpp tests/fuzz/sharded_fuzzer.cpp -lfmt -lz -o sharded_fuzzer (one
//       line)
//   ./sharded_fuzzer -max_total_time=300 -max_len=4096 -only_ascii=1 corpus/
//   tests/fuzz/corpus/sharded
//
// What is new goes to the first folder, corpus/. Files are written below $TMPDIR: give one in
// memory. It stops at any outcome but the two that tests/support/sharded_checkpoint_support.h
// describes. tests/unit/06/sharded_checkpoint_test.cpp takes each file of the corpus once.

#include "tests/support/sharded_checkpoint_support.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const lockstep::testing::TempDir folder;
  for (const std::string& name : folder.names()) std::filesystem::remove_all(folder / name);
  lockstep::testing::check_sharded({reinterpret_cast<const char*>(data), size}, folder.path());
  return 0;
}
