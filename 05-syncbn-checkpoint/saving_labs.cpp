// The labs about saving: who writes a checkpoint, and when the others may read it.

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "05-syncbn-checkpoint/checkpointer.h"
#include "05-syncbn-checkpoint/labs.h"
#include "common/training/lab.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// --- What the labs share
// --------------------------------------------------------------------------

/// Calls work(directory) on all ranks with an empty directory, and removes it afterwards.
template <class Work>
void in_scratch_directory(ProcessGroup& group, Work work) {
  std::string mine = fs::temp_directory_path() / "lockstep-lab-XXXXXX";
  if (group.rank() == 0 && ::mkdtemp(mine.data()) == nullptr) {
    fail<EnvironmentError>(
        "cannot make a directory {}: {}; set TMPDIR to one that you may write to", mine,
        std::strerror(errno));
  }
  const fs::path directory = group.exchange(mine).at(0);
  const auto remove = [&] {
    std::error_code ignored;
    if (group.rank() == 0) fs::remove_all(directory, ignored);
  };
  try {
    work(directory);
  } catch (...) {
    remove();  // not left to a destructor: an error may end the program without unwinding
    throw;
  }
  group.barrier();
  remove();
}

/// One that saves correctly.
Checkpointer checkpointer_of(RankTraining& training, const fs::path& directory) {
  return Checkpointer(files_of({*training.model.network, training.parameters, training.optimizer}),
                      training.comm, training.group.exchanger(),
                      {.directory = directory, .say = [](const std::string&) {}});
}

// --- All ranks save ------------------------------------------------------------------------------

/// What a reader finds, in a line.
std::string reading(const fs::path& file) {
  try {
    const SafetensorsFile found = load_safetensors(file);
    return fmt::format("a whole file of {} tensors", found.tensors().size());
  } catch (const Error& error) {
    const std::string text = error.what();
    return "refused: " + text.substr(text.find(": ") + 2);  // without the directory's name
  }
}

/// The mistake: every rank opens the same file, and writes header and tensors as it gets to them.
/// The ranks take turns, so that the race ends in the same way each time.
void write_all_at_once(RankTraining& training, const fs::path& path) {
  ProcessGroup& group = training.group;
  const std::vector<StateTensor> state = state_dict(*training.model.network);
  const std::vector<std::byte> bytes =
      serialize_safetensors(file_entries(state), {{"format", "pt"}}, Checksums::crc32);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  const auto header = std::streamsize(sizeof length + length);
  const char* const text = reinterpret_cast<const char*>(bytes.data());

  std::ofstream file;
  const auto write_header = [&] {
    file.open(path, std::ios::binary | std::ios::trunc);
    file.write(text, header).flush();
  };
  const auto write_tensors = [&] { file.write(text + header, std::ssize(bytes) - header).flush(); };
  if (group.rank() == 0) write_header();
  group.barrier();
  if (group.rank() != 0) write_header();
  group.barrier();
  say(group, fmt::format("while they write: {}", reading(path)));
  group.barrier();
  if (group.rank() != 0) write_tensors();
  group.barrier();
  if (group.rank() == 0) write_tensors();
}

}  // namespace

/// The ranks have the same weights, but, without SyncBatchNorm, their own running statistics.
void all_ranks_save(ProcessGroup& group, bool fixed) {
  RankTraining training(group, ModelKind::seed_bn);
  const BatchSplit dealt{BatchSplit::Kind::stride, group.world_size()};
  training.forward_and_backward(training.first_batch(kLabBatch),
                                {dealt.divide(kLabBatch).at(size_t(group.rank()))}, 1);
  in_scratch_directory(group, [&](const fs::path& directory) {
    const TrainingState state{.steps = 1};
    const fs::path path = checkpoint_path(directory, state.steps);
    if (fixed) {
      checkpointer_of(training, directory).save(state);
    } else {
      write_all_at_once(training, path);
      group.barrier();
    }
    say(group, fmt::format("when all are done: {}", reading(path)));
  });
}

namespace {

// --- No barrier ----------------------------------------------------------------------------------

/// The mistake: each rank finds out by itself where training continues. Rank 0 is still saving when
/// the others look.
TrainingState look_for_oneself(RankTraining& training, const fs::path& directory,
                               const TrainingState& saved, const TrainingState& begin) {
  const Trained trained{*training.model.network, training.parameters, training.optimizer};
  const auto look = [&] {
    const auto newest = newest_checkpoint(directory, [](const std::string&) {});
    if (!newest) return begin;
    restore(*newest, trained);
    return TrainingState::from_json(newest->training, "the checkpoint");
  };
  if (training.group.rank() != 0) {
    const TrainingState found = look();
    training.group.barrier();
    return found;
  }
  training.group.barrier();
  save_checkpoint(directory, trained, saved);
  return look();
}

}  // namespace

void no_barrier(ProcessGroup& group, bool fixed) {
  RankTraining training(group);
  const TrainingState begin{.world_size = group.world_size()};
  TrainingState saved = begin;
  saved.steps = 100;
  in_scratch_directory(group, [&](const fs::path& directory) {
    Checkpointer checkpointer = checkpointer_of(training, directory);
    if (fixed) checkpointer.save(saved);
    const TrainingState found = fixed ? checkpointer.resume("auto", begin)
                                      : look_for_oneself(training, directory, saved, begin);
    const std::vector<std::string> lines =
        group.exchange(fmt::format("rank {} goes on from step {}", group.rank(), found.steps));
    for (const std::string& line : lines) say(group, line);
  });
}

}  // namespace lockstep
