// Damaged checkpoints: every one is refused, and the one before it is taken.

#include <fstream>
#include <map>

#include "common/core/error.h"
#include "common/training/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/unit/05/checkpoint_runs.h"

namespace lockstep {
namespace {

using namespace testing::checkpoints;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using testing::operator+;
using testing::TempDir;
using testing::Words;

// --- Damage --------------------------------------------------------------------------------------

/// Both files of a small checkpoint by name.
std::map<std::string, std::string> small_files(const TempDir& folder) {
  SmallRun(4).save(folder.path());
  return contents_of(folder);
}

/// The message from reading it. A crash or another exception than BadInput ends the test.
std::string refusal_of(const fs::path& path) {
  try {
    read_checkpoint(path);
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("A checkpoint cut off at any byte of either file is refused", "[checkpoint][row113]") {
  const TempDir folder;
  const auto files = small_files(folder);
  REQUIRE(files.size() == 2);
  for (const auto& [name, whole] : files) {
    for (size_t size = whole.size(); size-- > 0;) {
      fs::resize_file(folder / name, size);
      if (refusal_of(folder / checkpoint_name(4)).find("truncated") == std::string::npos) {
        FAIL(name << " cut to " << size << " of " << whole.size() << " bytes");
      }
    }
    testing::write_file(folder / name, whole);
  }
  CHECK(refusal_of(folder / checkpoint_name(4)) == "");
}

// Sanitizers take their time, and are here for what the reader does with any bytes at all.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kEachBit = 11;
#else
constexpr size_t kEachBit = 1;
#endif

TEST_CASE("One flipped bit anywhere in either file is found", "[checkpoint][row114]") {
  const TempDir folder;
  for (const auto& [name, whole] : small_files(folder)) {
    std::fstream file(folder / name, std::ios::in | std::ios::out | std::ios::binary);
    const auto overwrite = [&](size_t byte, int value) {
      file.seekp(static_cast<std::streamoff>(byte)).put(static_cast<char>(value)).flush();
    };
    for (size_t bit = 0; bit < 8 * whole.size(); bit += kEachBit) {
      overwrite(bit / 8, whole[bit / 8] ^ (1 << bit % 8));
      const std::string refusal = refusal_of(folder / checkpoint_name(4));
      if (!refusal.starts_with((folder / name).string()) || refusal.size() > 700) {
        FAIL("bit " << bit % 8 << " of byte " << bit / 8 << " of " << name << ": " << refusal);
      }
      overwrite(bit / 8, whole[bit / 8]);
    }
  }
  CHECK(refusal_of(folder / checkpoint_name(4)) == "");
}

TEST_CASE("Files that were not saved together are refused", "[checkpoint][row115]") {
  const TempDir folder, other;
  SmallRun run;
  run.save(folder.path(), 4);
  run.set(5);
  run.state.steps = 4;
  run.save(other.path());
  fs::copy_file(other / momentum_name(4), folder / momentum_name(4),
                fs::copy_options::overwrite_existing);
  CHECK_THAT(refusal_of(folder / checkpoint_name(4)),
             ContainsSubstring("the two files were not saved together"));
  fs::remove(folder / momentum_name(4));
  CHECK_THAT(refusal_of(folder / checkpoint_name(4)),
             ContainsSubstring(momentum_name(4) + ": No such file"));
}

TEST_CASE("Weights alone are no checkpoint", "[checkpoint]") {
  const TempDir folder;
  const SmallRun run(4);
  save_weights(folder / "weights", *run.network);
  CHECK_THAT(refusal_of(folder / "weights"),
             ContainsSubstring("found weights without a training state, expected a checkpoint"));
  save_safetensors(folder / "unsafe", file_entries(state_dict(*run.network)),
                   {{"lockstep.training", run.state.to_json()}});
  CHECK_THAT(refusal_of(folder / "unsafe"), ContainsSubstring("found weights without checksums"));
}

TEST_CASE("Where the newest is damaged, the one before it is taken and the damage named",
          "[checkpoint][row115]") {
  const TempDir folder;
  SmallRun run;
  run.save(folder.path(), 4);
  run.save(folder.path(), 8);
  run.save(folder.path(), 12);
  fs::resize_file(folder / checkpoint_name(12), 100);
  fs::remove(folder / momentum_name(8));
  Words warnings;
  const auto checkpoint =
      newest_checkpoint(folder.path(), [&](const std::string& line) { warnings.push_back(line); });
  REQUIRE(checkpoint);
  CHECK(checkpoint->path == folder / checkpoint_name(4));
  REQUIRE(warnings.size() == 2);
  CHECK_THAT(warnings[0], ContainsSubstring(checkpoint_name(12)) && ContainsSubstring("truncated"));
  CHECK_THAT(warnings[1], ContainsSubstring(momentum_name(8)));

  // A run that comes to the same step again replaces the damaged one; until then that does not
  // count among those that are kept, and stays.
  run.save(folder.path(), 6);
  run.save(folder.path(), 14);
  remove_old_checkpoints(folder.path(), 14, 3, {8, 12});
  CHECK(find_checkpoints(folder.path()).size() == 5);
  fs::remove(folder / checkpoint_name(14));
  remove_old_checkpoints(folder.path(), 6, 2);
  CHECK(newest_mark(folder.path()) == 6);
  CHECK(find_checkpoints(folder.path()).size() == 4);
  run.save(folder.path(), 12);
  CHECK(newest_mark(folder.path()) == 12);

  for (const int64_t steps : find_checkpoints(folder.path())) {
    fs::resize_file(folder / checkpoint_name(steps), 9);
  }
  CHECK_THAT(
      message_of<BadInput>([&] { newest_mark(folder.path()); }),
      ContainsSubstring("found 4 checkpoints, none of which can be read as such; give another"));
}

}  // namespace
}  // namespace lockstep
