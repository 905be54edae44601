// How ranks prove the job's key: who has it, who has not, and who has only seen others use it.

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/handshake.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/wire.h"
#include "common/system/secrets.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/proofs.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::Clock;
using testing::kLong;
using testing::kShort;
using testing::kSoon;
using testing::message_of;
using testing::seconds_since;
using testing::TempDir;
using State = Handshake::State;

const std::string kSecret = "a secret of some length", kOther = "another one, quite as long";
const std::string kNoError = "nothing was thrown";  // of message_of()
const JobKey kKey{JobKey::Source::secret, kSecret};

/// Gives one side what the other one says.
void pass(Handshake& from, Handshake& to) { to.take(from.take_output()); }

// --- The proof -----------------------------------------------------------------------------------

TEST_CASE("Both sides with the key prove it to each other, byte by byte too", "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  for (const JobKey& key : {kKey, JobKey{}}) {
    Handshake caller = Handshake::of_caller(key, "here", 0, 3);
    Handshake listener = Handshake::of_listener(key, "here", 0);
    for (Handshake* side : {&listener, &caller, &listener}) {
      const std::string said = (side == &caller ? listener : caller).take_output();
      for (const char byte : said) {
        REQUIRE(side->wanted() > 0);
        side->take({&byte, 1});
      }
    }
    CHECK((caller.state() == State::proven && listener.state() == State::proven));
    CHECK((caller.wanted() == 0 && listener.wanted() == 0));
    CHECK(listener.caller() == 3);
  }
}

TEST_CASE("HMAC-SHA-256 is that of RFC 4231", "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  std::string digits;
  for (const char byte : hmac("Jefe", "what do ya want for nothing?")) {
    digits += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  CHECK(digits == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST_CASE("Ranks whose keys differ are told so, and no error shows a key", "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  const auto error = [](const JobKey& callers, const JobKey& listeners) {
    Handshake caller = Handshake::of_caller(callers, "here", 0, 3);
    Handshake listener = Handshake::of_listener(listeners, "here", 0);
    pass(caller, listener);
    const bool same_kind = callers.source == listeners.source;
    CHECK((listener.state() == State::refused) == !same_kind);
    const std::string text = message_of<BadInput>([&] { pass(listener, caller); });
    CHECK(caller.state() == State::going);
    for (const std::string& secret : {kSecret, kOther}) {
      CHECK(text.find(secret) == text.npos);
      CHECK(listener.why_refused().find(secret) == listener.why_refused().npos);
    }
    return text;
  };
  CHECK(
      error({JobKey::Source::secret, kOther}, kKey) ==
      "rank 0 has a job key from LOCKSTEP_JOB_SECRET, and this rank 3 another one; give all ranks "
      "of a job the same LOCKSTEP_JOB_SECRET, and another job another MASTER_PORT");
  CHECK_THAT(error({}, kKey), ContainsSubstring("rank 0 has a job key from LOCKSTEP_JOB_SECRET, "
                                                "this rank 3 has no job key; give all"));
  CHECK_THAT(error(kKey, {}),
             ContainsSubstring("rank 0 has no job key, this rank 3 has a job key "));
  CHECK_THAT(error({JobKey::Source::open_mpi, kSecret}, kKey), ContainsSubstring("from Open MPI"));
}

TEST_CASE("A caller without the key is refused, also if it says the right words", "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  Handshake listener = Handshake::of_listener(kKey, "here", 0);
  listener.take(Handshake::of_caller(kKey, "here", 0, 1).take_output());
  CHECK(listener.state() == State::going);
  listener.take(std::string(kProofBytes, '\0'));
  CHECK(listener.state() == State::refused);
}

TEST_CASE("What was overheard proves nothing again", "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  Handshake caller = Handshake::of_caller(kKey, "here", 0, 1);
  Handshake listener = Handshake::of_listener(kKey, "here", 0);
  const std::string first = caller.take_output();
  listener.take(first);
  const std::string answer = listener.take_output();
  caller.take(answer);
  const std::string proof = caller.take_output();
  Handshake again = Handshake::of_listener(kKey, "here", 0);
  again.take(first);
  CHECK(again.take_output() != answer);
  again.take(proof);
  CHECK(again.state() == State::refused);
  Handshake victim = Handshake::of_caller(kKey, "here", 0, 1);
  CHECK_THROWS_AS(victim.take(answer), BadInput);
  listener.take(proof);  // here it fits
  CHECK(listener.state() == State::proven);
}

TEST_CASE("A proof that is sent back proves nothing, nor does one of another meeting",
          "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  Handshake listener = Handshake::of_listener(kKey, "here", 0);
  listener.take(Handshake::of_caller(kKey, "here", 0, 1).take_output());
  const std::string answer = listener.take_output();
  listener.take(answer.substr(answer.size() - kProofBytes));  // its own
  CHECK(listener.state() == State::refused);
  // The answer of a listener to a caller that thinks it is somewhere else, or is another rank.
  const auto fits = [](const std::string& where, int rank, int caller_rank) {
    Handshake caller = Handshake::of_caller(kKey, "here", 0, 1);
    Handshake other = Handshake::of_listener(kKey, where, rank);
    std::string first = caller.take_output();
    first[kHandshakeMagic.size() + 5] = static_cast<char>(caller_rank);
    other.take(first);
    return message_of<BadInput>([&] { pass(other, caller); }) == kNoError;
  };
  CHECK(fits("here", 0, 1));
  CHECK_FALSE(fits("there", 0, 1));
  CHECK_FALSE(fits("here", 2, 1));
  CHECK_FALSE(fits("here", 0, 2));
}

TEST_CASE("Another protocol, and another build, are recognised by their first bytes",
          "[handshake]") {
  for (const std::string text : {"H", "LOCKSTEQ", "\x16\x03\x01"}) {
    Handshake listener = Handshake::of_listener({}, "here", 0);
    listener.take(text);
    CHECK(listener.state() == State::refused);
    CHECK(listener.take_output().empty());
    Handshake caller = Handshake::of_caller({}, "here", 0, 1);
    CHECK_THROWS_AS(caller.take(text), NotLockstep);
  }
  Handshake of_no_rank = Handshake::of_listener({}, "here", 0);
  of_no_rank.take(Handshake::of_caller({}, "here", 0, -1).take_output());  // 2^32 - 1
  CHECK(of_no_rank.state() == State::refused);
  Handshake caller = Handshake::of_caller({}, "here", 0, 1);
  Handshake listener = Handshake::of_listener({}, "here", 0);
  std::string newer = caller.take_output();
  ++newer[kHandshakeMagic.size()];
  listener.take(newer);
  CHECK(listener.state() == State::refused);
  std::string answer = listener.take_output();
  ++answer[kHandshakeMagic.size()];
  CHECK_THAT(message_of<BadInput>([&] { caller.take(answer); }),
             ContainsSubstring("rank 0 speaks version 4 of the protocol between ranks, this rank "
                               "version 3; run the same build"));
}

// --- The door ------------------------------------------------------------------------------------

TEST_CASE("Half a handshake is given up, and however many come, few places are taken",
          "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  const Socket listener = listen_on({"127.0.0.1", 0});
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = descriptors();
  FrontDoor door(listener, kKey, "here", 0, 2, kShort);
  std::vector<Socket> strangers;
  const auto serve = [&](double seconds) {
    size_t guests = 0;
    for (const Deadline deadline(seconds); !deadline.passed();) {
      door.accept_some();
      guests += door.hear().size();
    }
    return guests;
  };
  for (int i = 0; i < 400; ++i) {
    strangers.push_back(connect_to(listener.local_address(), Deadline(kLong)));
    if (i % 2 == 0) {  // half a handshake
      send_all(strangers.back(), bytes_of(Handshake::of_caller(kKey, "here", 0, 1).take_output()),
               Deadline(kLong));
    }
  }
  CHECK(serve(0.1) == 0);
  CHECK(descriptors() - before - 400 <= 2 * 66);
  // Until all that wait at the listener have come, and their patience has passed.
  for (const Deadline deadline(kLong); descriptors() - before > 400 && !deadline.passed();) {
    CHECK(serve(kShort) == 0);
  }
  CHECK(descriptors() - before <= 400);
  CHECK_THAT(door.last_refused(), ContainsSubstring("a process that says it is rank 1 went away") ||
                                      Catch::Matchers::Equals(""));
}

TEST_CASE("Neither who came before many silent connections nor who comes after them is kept out",
          "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  const Socket listener = listen_on({"127.0.0.1", 0});
  FrontDoor door(listener, kKey, "here", 0, 3, kLong);
  std::vector<Socket> sockets;
  std::vector<int> guests;
  const auto serve = [&] {
    door.accept_some();
    for (const FrontDoor::Guest& guest : door.hear()) guests.push_back(guest.rank);
  };
  const auto connect = [&]() -> Socket& {
    return sockets.emplace_back(connect_to(listener.local_address(), Deadline(kLong)));
  };
  const auto begin = [&](const Socket& socket, Handshake& caller) {
    send_all(socket, bytes_of(caller.take_output()), Deadline(kLong));
    std::string answer(caller.wanted(), '\0');
    size_t came = 0;
    for (const Deadline deadline(kSoon); came == 0 && !deadline.passed();) {
      serve();
      came = socket.receive_some(writable_bytes_of(answer));
    }
    caller.take(answer.substr(0, came));
  };
  sockets.reserve(300);
  Handshake before = Handshake::of_caller(kKey, "here", 0, 1),
            after = Handshake::of_caller(kKey, "here", 0, 2);
  const Socket& first = connect();
  begin(first, before);
  for (int i = 0; i < 200; ++i) {
    connect();
    serve();
  }
  const Socket& last = connect();
  begin(last, after);
  for (const auto& [socket, caller] : {std::pair(&first, &before), {&last, &after}}) {
    for (const Deadline deadline(kSoon); caller->state() == State::going && !deadline.passed();) {
      begin(*socket, *caller);
    }
    send_all(*socket, bytes_of(caller->take_output()), Deadline(kLong));
  }
  for (const Deadline deadline(kSoon); guests.size() < 2 && !deadline.passed();) serve();
  std::ranges::sort(guests);
  CHECK(guests == std::vector<int>{1, 2});
}

// --- Where the key comes from --------------------------------------------------------------------

using KeyVariables = std::map<std::string, std::string>;

JobKey key_from(const KeyVariables& variables) {
  return read_job_key([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

JobKey key_from_one(const std::string& name, const std::string& value) {
  return key_from({{name, value}});
}

TEST_CASE("The key is from the first source that is there", "[handshake]") {
  CHECK_FALSE(key_from({}).exists());
  if (!proofs_availability().empty()) {  // refused, and never ignored
    for (const char* name : {"LOCKSTEP_JOB_SECRET", "LOCKSTEP_JOB_SECRET_FILE", kLauncherKey}) {
      CHECK_THAT(message_of<EnvironmentError>([&] { key_from_one(name, kSecret); }),
                 ContainsSubstring(name + std::string(" is set, and this build has no libsodium")));
    }
    return;
  }
  const TempDir folder;
  const std::string file = folder / "secret";
  testing::write_file(file, kOther + "\n");
  ::chmod(file.c_str(), 0600);
  KeyVariables all{{"LOCKSTEP_JOB_SECRET", kSecret},
                   {"LOCKSTEP_JOB_SECRET_FILE", file},
                   {kLauncherKey, "0123456789abcdef"},
                   {"OMPI_MCA_orte_precondition_transports", "4567"}};
  CHECK((key_from(all).source == JobKey::Source::secret && key_from(all).bytes == kSecret));
  all["LOCKSTEP_JOB_SECRET"] = "";
  CHECK((key_from(all).source == JobKey::Source::secret && key_from(all).bytes == kOther));
  all.erase("LOCKSTEP_JOB_SECRET_FILE");
  CHECK((key_from(all).source == JobKey::Source::launcher &&
         key_from(all).bytes == "0123456789abcdef"));
  all.erase(kLauncherKey);
  CHECK((key_from(all).source == JobKey::Source::open_mpi && key_from(all).bytes == "4567"));
  const std::string few =
      message_of<BadInput>([] { key_from_one("LOCKSTEP_JOB_SECRET", "swordfish"); });
  CHECK_THAT(few,
             ContainsSubstring("LOCKSTEP_JOB_SECRET: the secret has 9 bytes, expected 16 to "));
  CHECK(few.find("swordfish") == few.npos);
  CHECK_THAT(message_of<BadInput>([] { key_from_one(kLauncherKey, "0123"); }),
             ContainsSubstring("the secret has 4 bytes"));
  for (const size_t size : {15u, 16u, 4096u, 4097u}) {
    const std::string secret(size, 'x');
    const bool fits = size == 16 || size == 4096;
    std::string got;
    const auto read = [&] { got = key_from_one("LOCKSTEP_JOB_SECRET", secret).bytes; };
    CHECK((message_of<BadInput>(read) == kNoError) == fits);
    CHECK((got == secret) == fits);
  }
  testing::write_file(file, kOther + "\r\n");  // of another system's editor
  CHECK(key_from_one("LOCKSTEP_JOB_SECRET_FILE", file).bytes == kOther);
}

TEST_CASE("A rank takes the key out of its environment, and keeps it", "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  const testing::ScopedEnvironment secret("LOCKSTEP_JOB_SECRET", kSecret);
  const testing::ScopedEnvironment launcher(kLauncherKey, "0123456789abcdef");
  for (int group = 0; group < 2; ++group) {  // a process may have one group after another
    const JobKey key = take_job_key();
    CHECK((key.source == JobKey::Source::secret && key.bytes == kSecret));
    CHECK((std::getenv("LOCKSTEP_JOB_SECRET") == nullptr && std::getenv(kLauncherKey) == nullptr));
  }
}

TEST_CASE("A secret's file that others could have read or written is refused", "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  const TempDir folder;
  const std::string file = folder / "secret", link = folder / "link", pipe = folder / "pipe";
  testing::write_file(file, kSecret);
  std::filesystem::create_symlink(file, link);
  ::mkfifo(pipe.c_str(), 0600);
  const auto error = [](const std::string& path) {
    const std::string text =
        message_of<BadInput>([&] { key_from_one("LOCKSTEP_JOB_SECRET_FILE", path); });
    CHECK(text.find('\n') == text.npos);
    CHECK(text.find(kSecret) == text.npos);
    return text;
  };
  for (const int mode : {0644, 0640, 0604, 0660, 0700, 0400, 04600}) {
    ::chmod(file.c_str(), static_cast<mode_t>(mode));
    CHECK_THAT(error(file),
               ContainsSubstring(fmt::format("the file has mode {:04o}, expected 0600", mode)));
  }
  ::chmod(file.c_str(), 0600);
  CHECK(error(file) == kNoError);
  CHECK_THAT(error(link), ContainsSubstring("link: a symbolic link; expected a file of this user"));
  CHECK_THAT(error(pipe), ContainsSubstring("pipe: not a regular file"));
  CHECK_THAT(error(folder / "."), ContainsSubstring("not a regular file"));
  CHECK_THAT(error(folder / "none"), ContainsSubstring("none: No such file"));
  testing::write_file(file, "");
  CHECK_THAT(error(file), ContainsSubstring("the secret has 0 bytes"));
  testing::write_file(file, std::string(5000, 'x'));
  CHECK_THAT(error(file), ContainsSubstring("more than 4096 bytes"));
  if (::geteuid() != 0) return;
  testing::write_file(file, kSecret);
  REQUIRE(::chown(file.c_str(), 65534, 0) == 0);
  CHECK_THAT(error(file), ContainsSubstring("belongs to user 65534, expected user 0"));
}

// --- The key that rank 0 makes -------------------------------------------------------------------

/// Calls work() in a thread of another user.
void as_nobody(const std::function<void()>& work) {
  std::thread([&] {
    ::syscall(SYS_setresuid, -1, 65534, -1);  // of this thread alone
    work();
  }).join();
}

TEST_CASE("Ranks of the same user get rank 0's key; other users, and other keys, do not",
          "[handshake]") {
  LOCKSTEP_NEEDS_PROOFS();
  const Socket port = listen_on({"127.0.0.1", 0});  // so that no other test has the name
  const Address at = port.local_address();
  const JobKey made = random_job_key();
  JobKey got;
  const auto ask = [&] {
    return message_of<Error>([&] { got = ask_for_key(at, 1, Deadline(kShort)); });
  };
  CHECK_THAT(ask(), ContainsSubstring("hands out no job key on this host within 0.3 s"));
  std::optional<KeyDesk> desk;
  bool refused = false;
  const auto served = [&](const std::function<void()>& client) {
    std::atomic<bool> done = false;
    std::thread server([&] {
      while (!done) refused = desk->serve() || refused;
    });
    client();
    done = true;
    server.join();
  };
  desk.emplace(at, made);
  CHECK_THAT(message_of<EnvironmentError>([&] { KeyDesk(at, made); }),
             ContainsSubstring("another process has it; give another MASTER_PORT"));
  served([&] { CHECK(ask() == kNoError); });
  CHECK((got.source == JobKey::Source::rank_0 && got.bytes == made.bytes && !refused));
  if (::geteuid() == 0) {
    std::string error;
    served([&] { as_nobody([&] { error = ask(); }); });
    CHECK_THAT(error, ContainsSubstring("rank 1: a process of another user offers the job key"));
    // A stranger who does not care whose the desk is.
    std::string told(1, '\0');
    served([&] {
      as_nobody([&] {
        const Socket socket = connect_under("lockstep-key-" + at.text(), "desk", Deadline(kSoon));
        CHECK_THROWS_AS(receive_all(socket, writable_bytes_of(told), Deadline(kSoon)), PeerLost);
      });
    });
    CHECK((refused && told == std::string(1, '\0')));
  }
  refused = false;
  desk.reset();
  desk.emplace(at, kKey);
  got = {};
  served([&] { CHECK_THAT(ask(), ContainsSubstring("rank 0 has a job key from LOCKSTEP_JOB_S")); });
  CHECK((refused && got.bytes.empty()));
  std::string said(1 + kJobKeyBytes, 'x');  // all that the desk of a secret says
  served([&] {
    const Socket socket = connect_under("lockstep-key-" + at.text(), "desk", Deadline(kSoon));
    receive_all(socket, writable_bytes_of(said), Deadline(kSoon));
  });
  CHECK(said.substr(1) == std::string(kJobKeyBytes, '\0'));
}

}  // namespace
}  // namespace lockstep
