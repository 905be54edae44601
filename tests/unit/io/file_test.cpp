// Files on a disk: what saving must survive, and what it says when it cannot.

#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <thread>

#include "common/core/text.h"
#include "common/io/file.h"
#include "common/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/process.h"
#include "tests/support/replaced_system_calls.h"
#include "tests/support/safetensors_support.h"

namespace lockstep {
namespace {

using namespace lockstep::testing::io;
using Catch::Matchers::ContainsSubstring;
using testing::TempDir;
using Names = std::vector<std::string>;
using testing::SystemCalls;

void save(const std::filesystem::path& path, const std::string& bytes) {
  const std::vector<std::byte> payload = to_bytes(bytes);
  const TensorEntry tensor{"w", DType::U8, {static_cast<std::int64_t>(bytes.size())}, payload};
  save_safetensors(path, {&tensor, 1});
}

std::string load(const std::filesystem::path& path) {
  return to_string(load_safetensors(path).tensors().at(0).bytes);
}

/// The text of the EnvironmentError that `body` throws; another exception passes through.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "no error";
}

/// The same for a user who may not do everything.
std::string error_without_rights(const std::function<void()>& body) {
  std::string error;
  testing::without_capabilities([&] { error = error_of(body); });
  return error;
}

TEST_CASE("A directory is made with those above it, durably, or the error says why not", "[file]") {
  const TempDir directory;
  SystemCalls calls;
  CHECK(make_directory(directory / "a/b/") == std::vector{directory / "a/b", directory / "a"});
  CHECK(std::filesystem::is_directory(directory / "a/b"));
  CHECK(calls.log == Names(2, "fsync directory"));
  CHECK(make_directory(directory / "a/b").empty());  // there it is
  CHECK(calls.log.size() == 2);
  std::ofstream(directory / "file") << "x";
  CHECK_THAT(error_of([&] { make_directory(directory / "file/x"); }),
             ContainsSubstring("cannot make the directory ") &&
                 ContainsSubstring("file/x: Not a directory; give one that you may write to"));
  CHECK_THAT(error_of([&] { make_directory(directory / "file"); }), ContainsSubstring("cannot "));
  std::filesystem::permissions(directory / "a/b", std::filesystem::perms(0555));
  CHECK_THAT(error_without_rights([&] { make_directory(directory / "a/b"); }),
             ContainsSubstring("cannot write to the directory ") &&
                 ContainsSubstring("a/b: Permission denied; give one"));
}

TEST_CASE("A save reaches the disk before it takes the old file's place", "[safetensors][file]") {
  const TempDir directory;
  SystemCalls calls;
  save(directory / "model.safetensors", "0123456789");
  const auto size = std::filesystem::file_size(directory / "model.safetensors");
  CHECK(calls.log ==
        Names{fmt::format("fsync file of {} bytes", size), "rename", "fsync directory"});
  CHECK(directory.names() == Names{"model.safetensors"});
}

TEST_CASE("A save that fails leaves the old file and no other", "[safetensors][file]") {
  const TempDir directory;
  const auto path = directory / "model.safetensors";
  save(path, "old");
  const auto size = std::filesystem::file_size(path);
  for (const std::string& failing :
       {fmt::format("fsync file of {} bytes", size), std::string("rename")}) {
    INFO(failing);
    SystemCalls calls;
    calls.failing = failing;
    const std::string error = error_of([&] { save(path, "new"); });
    CHECK_THAT(error, ContainsSubstring("cannot save " + path.string()));
    CHECK_THAT(error, ContainsSubstring("Input/output error; check the disk"));
    CHECK(load(path) == "old");
    CHECK(directory.names() == Names{"model.safetensors"});
  }
}

TEST_CASE("A directory that cannot be synced is an error, but the new file is whole",
          "[safetensors][file]") {
  const TempDir directory;
  SystemCalls calls;
  calls.failing = "fsync directory";
  const std::string error = error_of([&] { save(directory / "model.safetensors", "new"); });
  CHECK_THAT(error, ContainsSubstring("making its new name durable"));
  CHECK(load(directory / "model.safetensors") == "new");
}

TEST_CASE("A full disk is one clear error, and the old file stays", "[safetensors][file]") {
  const TempDir directory;
  const auto path = directory / "model.safetensors";
  save(path, "old");
  const std::string error = error_of([&] {
    const testing::FullDisk full(4096);
    save(path, std::string(100'000, 'x'));
  });
  CHECK_THAT(error, ContainsSubstring("cannot save " + path.string()));
  CHECK_THAT(error, ContainsSubstring("writing: File too large; free some space"));
  CHECK(load(path) == "old");
  CHECK(directory.names() == Names{"model.safetensors"});
}

TEST_CASE("A directory without write permission is one clear error", "[safetensors][file]") {
  const TempDir directory;
  const auto path = directory / "model.safetensors";
  save(path, "old");
  ::chmod(directory.path().c_str(), 0555);
  const std::string error = error_without_rights([&] { save(path, "new"); });
  ::chmod(directory.path().c_str(), 0755);
  CHECK_THAT(error, ContainsSubstring("cannot save " + path.string()));
  CHECK_THAT(error, ContainsSubstring("Permission denied; give a path in a directory"));
  CHECK(load(path) == "old");
}

TEST_CASE("A path where no file can be is one clear error", "[safetensors][file]") {
  const TempDir directory;
  SECTION("the directory is missing") {
    CHECK_THAT(error_of([&] { save(directory / "no/model.safetensors", "new"); }),
               ContainsSubstring("No such file or directory; create the directory"));
  }
  SECTION("a file stands where the directory should be") {
    testing::write_file(directory / "file", "text");
    CHECK_THAT(error_of([&] { save(directory / "file/model.safetensors", "new"); }),
               ContainsSubstring("Not a directory; create the directory"));
  }
  SECTION("a directory stands where the file should be") {
    std::filesystem::create_directory(directory / "model.safetensors");
    CHECK_THAT(error_of([&] { save(directory / "model.safetensors", "new"); }),
               ContainsSubstring("Is a directory; give the path of a file"));
    CHECK(directory.names() == Names{"model.safetensors"});
    CHECK(std::filesystem::is_empty(directory / "model.safetensors"));
  }
  SECTION("the path names no file") {
    CHECK_THROWS_AS(save(directory / "", "new"), BadInput);
    CHECK_THROWS_AS(save("", "new"), BadInput);
  }
  SECTION("the tensors are wrong: nothing is created") {
    const TensorEntry tensor{"w", DType::F32, {2}, {}};
    CHECK_THROWS_AS(save_safetensors(directory / "model.safetensors", {&tensor, 1}), BadInput);
    CHECK(directory.names().empty());
  }
}

TEST_CASE("A path without a directory means the current one", "[safetensors][file]") {
  const TempDir directory;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(directory.path());
  CHECK(error_of([&] { save("model.safetensors", "here"); }) == "no error");
  std::filesystem::current_path(before);
  CHECK(load(directory / "model.safetensors") == "here");
}

TEST_CASE("A saved file is readable for others as the umask says", "[safetensors][file]") {
  const TempDir directory;
  const mode_t before = ::umask(027);
  save(directory / "model.safetensors", "new");
  ::umask(before);
  const auto permissions = std::filesystem::status(directory / "model.safetensors").permissions();
  CHECK(static_cast<int>(permissions) == 0640);
}

TEST_CASE("Every name that the file system takes can be saved to", "[safetensors][file]") {
  const TempDir directory;
  for (const size_t length : {240, 241, 245, 250, 254, 255}) {
    const std::string name(length, 'x');
    save(directory / name, "new");
    CHECK(load(directory / name) == "new");
  }
  CHECK_THAT(error_of([&] { save(directory / std::string(256, 'x'), "new"); }),
             ContainsSubstring("File name too long"));
  CHECK(directory.names().size() == 6);
}

TEST_CASE("A file that is replaced keeps its permissions", "[safetensors][file]") {
  const TempDir directory;
  const auto path = directory / "model.safetensors";
  for (const mode_t mode : {0640, 0600, 0664, 0444}) {
    save(path, "old");
    ::chmod(path.c_str(), mode);
    save(path, "new");
    CHECK(mode_t(std::filesystem::status(path).permissions()) == mode);
    CHECK(load(path) == "new");
  }
}

TEST_CASE("A path that a user names is where its links lead", "[file]") {
  namespace fs = std::filesystem;
  const TempDir directory;
  fs::create_directory(directory / "other");
  fs::create_symlink("other/there", directory / "link");
  fs::create_symlink(directory / "link", directory / "link to it");
  fs::create_symlink("circle", directory / "circle");
  CHECK(followed(directory / "link") == directory / "other/there");
  CHECK(followed(directory / "link to it") == directory / "other/there");
  CHECK(followed(directory / "circle") == directory / "circle");
  CHECK(followed(directory / "none") == directory / "none");
  CHECK(followed("name") == "name");
  for (int i = 0; i < 2; ++i) {  // there is no file yet; there is one
    write_json((directory / "link to it").string(), i);
    CHECK(testing::read_text(directory / "other/there") == std::to_string(i) + "\n");
    ::chmod((directory / "other/there").c_str(), 0640);
  }
  CHECK(fs::is_symlink(directory / "link"));
  CHECK(int(fs::status(directory / "link").permissions()) == 0640);
}

TEST_CASE("A temporary file of a killed run is not in the way", "[safetensors][file]") {
  const TempDir directory;
  const std::string leftover = fmt::format(".model.safetensors.{}-0.tmp", ::getpid());
  testing::write_file(directory / leftover, "half");
  save(directory / "model.safetensors", "new");
  CHECK(load(directory / "model.safetensors") == "new");
  CHECK(testing::read_text(directory / leftover) == "half");
}

TEST_CASE("A reader among two writers always finds one whole file", "[safetensors][file]") {
  const TempDir directory;
  const auto path = directory / "model.safetensors";
  const std::string contents[2] = {std::string(200'000, 'a'), std::string(100'000, 'b')};
  save(path, contents[0]);
  std::atomic<int> running = 2;
  std::string errors[2];
  const auto writer = [&](int i) {
    errors[i] = error_of([&] {
      for (int n = 0; n < 25; ++n) save(path, contents[i]);
    });
    --running;
  };
  std::thread first(writer, 0);
  std::thread second(writer, 1);
  int whole = 0;
  int torn = 0;
  do {
    std::string found;
    try {
      found = load(path);
    } catch (const Error& error) {
      found = error.what();
    }
    (found == contents[0] || found == contents[1] ? whole : torn) += 1;
  } while (running > 0);
  first.join();
  second.join();
  CHECK(errors[0] == "no error");
  CHECK(errors[1] == "no error");
  CHECK(whole > 0);
  CHECK(torn == 0);
  CHECK(directory.names() == Names{"model.safetensors"});
}

TEST_CASE("A file that cannot be read is one clear error", "[safetensors][file]") {
  const TempDir directory;
  const auto refuses = [](const std::filesystem::path& path, const std::string& text) {
    CHECK_THROWS_WITH(load_safetensors(path),
                      ContainsSubstring(path.string()) && ContainsSubstring(text));
    CHECK_THROWS_AS(load_safetensors(path), BadInput);
  };
  refuses(directory / "missing", "No such file or directory");
  refuses(directory.path(), "found a directory, expected a regular file");
  REQUIRE(::mkfifo((directory / "pipe").c_str(), 0600) == 0);
  refuses(directory / "pipe", "found a pipe or device");  // and does not wait for a writer
  testing::write_file(directory / "empty", "");
  refuses(directory / "empty", "found 0 bytes, expected at least 8");
}

TEST_CASE("A temporary name is not cut within a character", "[io]") {
  const TempDir folder;
  const int watch = ::inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  REQUIRE(::inotify_add_watch(watch, folder.path().c_str(), IN_CREATE) >= 0);
  for (const std::string before : {"", "x"}) {
    std::string name = before;
    while (name.size() < 253) name += "é";  // two bytes
    write_file_atomically(folder / name, {});
  }
  alignas(inotify_event) std::array<char, 4096> events{};
  const ssize_t size = ::read(watch, events.data(), events.size());
  ::close(watch);
  int names = 0;
  for (ssize_t at = 0; at < size; ++names) {
    const auto* const event = reinterpret_cast<const inotify_event*>(&events[size_t(at)]);
    const std::string_view name = event->name;
    CHECK(find_invalid_utf8(name) == name.size());
    at += ssize_t(sizeof(inotify_event)) + event->len;
  }
  CHECK(names == 2);
}

}  // namespace
}  // namespace lockstep
