// Hidden cases of stage 05.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage05_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

/// Mean, M2 and rows of so many parts, some of them empty.
void tell_merged(Hidden& hidden, int64_t count) {
  std::vector<Statistics> parts{{double(hidden.real()), 2, 3}};
  while (std::ssize(parts) < count) {
    const double rows = double(hidden.whole(0, 6));
    parts.push_back(
        {rows == 0 ? 0 : double(hidden.real()), rows < 2 ? 0 : double(hidden.whole(0, 20)), rows});
  }
  const Statistics whole = merged(parts);
  hidden.tell(fmt::format("mean, M2 and rows of {} parts", count),
              std::vector<double>{whole.mean, whole.m2, whole.rows});
}

TEST_CASE("Two other parts", "[hidden05.1]") {
  Hidden hidden("05.1 two");
  for (int time = 0; time < 6; ++time) {
    const double rows = double(hidden.whole(1, 9));
    const Statistics whole =
        merged({{double(hidden.real()), 4, rows}, {double(hidden.real()), 3, rows}});
    hidden.tell("mean, M2 and rows of two parts of the same size",
                std::vector<double>{whole.mean, whole.m2, whole.rows});
  }
}

TEST_CASE("Other parts", "[hidden05.1]") {
  Hidden hidden("05.1");
  for (int time = 0; time < 8; ++time) tell_merged(hidden, hidden.whole(1, 6));
}

TEST_CASE("Other channels", "[hidden05.1]") {
  Hidden hidden("05.1 channels");
  const testing::TestDevice device;
  const int64_t parts = hidden.whole(2, 4), channels = hidden.whole(2, 5);
  std::vector<Real> gathered;
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t channel = 0; channel < channels; ++channel) gathered.push_back(hidden.real());
    for (int64_t channel = 0; channel < channels; ++channel) gathered.push_back(hidden.share());
    gathered.push_back(Real(hidden.whole(1, 5)));
  }
  const Tensor whole = device.filled({2 * channels + 1}, -1);
  device.kernels().batch_norm_merge(device.stream, device.put({parts, 2 * channels + 1}, gathered),
                                    whole);
  hidden.tell(fmt::format("{} parts of {} channels", parts, channels), whole.to_host());
}

TEST_CASE("Other sums", "[hidden05.2]") {
  Hidden hidden("05.2");
  for (int time = 0; time < 3; ++time) {
    LayerSums rank(2, hidden.real());
    rank.sums.copy_from_host(hidden.reals(2));
    rank.merge();
    rank.communication.synchronize();
    hidden.tell("sums of two ranks", rank.sums.to_host());
  }
}

/// So many capital letters.
std::string letters(Hidden& hidden, int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += char('A' + hidden.whole(0, 25));
  return text;
}

/// What a power cut would find: the last file that reached the disk before the rename, whether that
/// is the one with the new name, and whether the name got there after it.
void tell_order(Hidden& hidden, const std::string& which, const SystemCalls& calls,
                const std::filesystem::path& path) {
  const auto renamed = std::find(calls.log.begin(), calls.log.end(), "rename");
  std::string last = "none";
  for (auto call = calls.log.begin(); call != renamed; ++call) {
    if (call->rfind("fsync file", 0) == 0) last = *call;
  }
  const bool is_durable = std::find(renamed, calls.log.end(), "fsync directory") != calls.log.end();
  hidden.tell(which + "before the rename", last);
  struct stat renamed_file = {};
  ::stat(path.c_str(), &renamed_file);
  hidden.tell(which + "that is the new file",
              calls.last_file == renamed_file.st_ino ? "yes" : "no");
  hidden.tell(which + "the name is durable",
              is_durable && calls.last_directory == path.parent_path() ? "yes" : "no");
}

TEST_CASE("Other files", "[hidden05.3]") {
  Hidden hidden("05.3");
  for (int time = 0; time < 3; ++time) {
    const TempDir directory;
    const std::filesystem::path path = directory / ("x" + letters(hidden, 5));
    const std::string old = letters(hidden, hidden.whole(0, 9));
    testing::write_file(path, old);
    std::vector<std::vector<std::byte>> texts;
    for (int64_t i = hidden.whole(0, 4); i > 0; --i) {
      texts.push_back(testing::io::to_bytes(letters(hidden, hidden.whole(0, 30))));
    }
    const std::vector<std::span<const std::byte>> pieces(texts.begin(), texts.end());
    for (const char* failing : {"rename", ""}) {
      SystemCalls calls;
      calls.failing = failing;
      std::string read_then = "(nothing was renamed)";
      calls.before_rename = [&](const char*, const char*) { read_then = text_of(path); };
      bool failed = false;
      try {
        write_file_atomically(path, pieces);
      } catch (const EnvironmentError&) {
        failed = true;
      }
      const std::string which = fmt::format("{} pieces: ", texts.size());
      hidden.tell(which + "failed", failed ? "yes" : "no");
      hidden.tell(which + "the file", text_of(path));
      hidden.tell(which + "files", directory.names());
      hidden.tell(which + "read before the rename", read_then);
      if (!failed) tell_order(hidden, which, calls, path);
    }
  }
}

TEST_CASE("Other positions", "[hidden05.4]") {
  Hidden hidden("05.4");
  for (int time = 0; time < 10; ++time) {
    const TrainingState state{.epoch = hidden.whole(0, 9), .step_in_epoch = hidden.whole(0, 99)};
    const int64_t epoch = state.epoch + hidden.whole(0, 2);
    hidden.tell(fmt::format("epoch {}, {} steps: the first batch of epoch {}", state.epoch,
                            state.step_in_epoch, epoch),
                state.first_batch(epoch));
  }
}

}  // namespace
}  // namespace lockstep
