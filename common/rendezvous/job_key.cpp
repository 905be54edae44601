#include "common/rendezvous/job_key.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "common/core/error.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/wire.h"
#include "common/system/descriptor.h"
#include "common/system/secrets.h"

namespace lockstep {
namespace {

constexpr const char* kSecret = "LOCKSTEP_JOB_SECRET";
constexpr const char* kSecretFile = "LOCKSTEP_JOB_SECRET_FILE";
// 128 bits, the same for every rank of a job.
constexpr const char* kOpenMpiSecret = "OMPI_MCA_orte_precondition_transports";
constexpr size_t kLeastSecretBytes = 16,
                 kMostSecretBytes = 4096;  // bytes of a secret: fewer could be guessed

constexpr const char* kMake = "(umask 077; head -c 32 /dev/urandom | base64 >FILE) makes one";

std::string checked(std::string secret, const std::string& name) {
  require(secret.size() >= kLeastSecretBytes && secret.size() <= kMostSecretBytes,
          "{}: the secret has {}{} bytes, expected {} to {} that nobody can guess; {}", name,
          secret.size() > kMostSecretBytes ? "more than " : "",
          std::min(secret.size(), kMostSecretBytes), kLeastSecretBytes, kMostSecretBytes, kMake);
  return secret;
}

/// Opens a file that only this user can have written and read: a link could lead anywhere.
Descriptor open_private(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  require(file.is_open(), "{}={}: {}; expected a file of this user with mode 0600", kSecretFile,
          path, errno == ELOOP ? "a symbolic link" : errno_text(errno));
  struct stat found = {};
  require(::fstat(file.get(), &found) == 0 && S_ISREG(found.st_mode),
          "{}={}: not a regular file; expected a file of this user with mode 0600", kSecretFile,
          path);
  require(found.st_uid == ::geteuid(),
          "{}={}: the file belongs to user {}, expected user {}, who runs this; make a copy with "
          "mode 0600",
          kSecretFile, path, found.st_uid, ::geteuid());
  require((found.st_mode & 07777) == 0600,
          "{}={}: the file has mode {:04o}, expected 0600, since others must not read the secret; "
          "chmod 600 it, or take a new secret if it was read",
          kSecretFile, path, found.st_mode & 07777);
  return file;
}

/// What is in the file, without the end of its last line.
std::string read_secret_file(const std::string& path) {
  const Descriptor file = open_private(path);
  std::string secret;
  std::array<char, kMostSecretBytes> some{};
  ssize_t size = 0;
  while (secret.size() <= kMostSecretBytes &&
         (size = ::read(file.get(), some.data(), some.size())) > 0) {
    secret.append(some.data(), size_t(size));
  }
  require(size >= 0, "{}={}: cannot read it: {}", kSecretFile, path, errno_text(errno));
  for (const char end : {'\n', '\r'}) {
    if (secret.ends_with(end)) secret.pop_back();
  }
  return checked(secret, fmt::format("{}={}", kSecretFile, path));
}

}  // namespace

std::string describe(JobKey::Source source) {
  switch (source) {
    case JobKey::Source::none:
      return "no job key";
    case JobKey::Source::secret:
      return fmt::format("a job key from {}", kSecret);
    case JobKey::Source::launcher:
      return "a job key from its launcher";
    case JobKey::Source::open_mpi:
      return "a job key from Open MPI";
    case JobKey::Source::rank_0:
      return "a job key that rank 0 made";
  }
  return "a job key of a kind that is not known here";
}

JobKey read_job_key(const std::function<const char*(const char* name)>& variable) {
  const auto given = [&](const char* name) {
    const char* value = variable(name);
    return value != nullptr && *value != '\0';
  };
  const std::string unable = proofs_availability();
  for (const char* name : {kSecret, kSecretFile, kLauncherKey}) {
    if (unable.empty() || !given(name)) continue;
    fail<EnvironmentError>(
        "{} is set, and {}: it cannot use a secret; unset {} for a job that "
        "trusts its network",
        name, unable, name);
  }
  if (given(kSecret)) return {JobKey::Source::secret, checked(variable(kSecret), kSecret)};
  if (given(kSecretFile)) return {JobKey::Source::secret, read_secret_file(variable(kSecretFile))};
  if (given(kLauncherKey))
    return {JobKey::Source::launcher, checked(variable(kLauncherKey), kLauncherKey)};
  if (given(kOpenMpiSecret) && unable.empty())
    return {JobKey::Source::open_mpi, variable(kOpenMpiSecret)};
  return {};
}

JobKey read_job_key() {
  return read_job_key([](const char* name) { return std::getenv(name); });
}

JobKey take_job_key() {
  static JobKey& taken = *new JobKey;
  const JobKey found = read_job_key();
  if (found.exists() || !taken.exists()) taken = found;
  for (const char* name : {kSecret, kLauncherKey}) ::unsetenv(name);
  return taken;
}

JobKey random_job_key() { return {JobKey::Source::rank_0, random_bytes(kJobKeyBytes)}; }

// --- A key from rank 0 ---------------------------------------------------------------------------

namespace {

constexpr int kServedAtOnce = 64;
constexpr const char* kGiveSecret =
    "give all ranks the same LOCKSTEP_JOB_SECRET, or start them by one launcher and user";

std::string name_of(const Address& store) { return "lockstep-key-" + store.text(); }

std::string message_of(const JobKey& key) {
  std::string out;
  put_number(out, static_cast<uint64_t>(key.source), 1);
  if (key.source == JobKey::Source::rank_0) out += key.bytes;
  out.resize(1 + kJobKeyBytes, '\0');
  return out;
}

Socket listen_at(const Address& store) {
  try {
    return listen_under(name_of(store));
  } catch (const EnvironmentError& error) {
    fail<EnvironmentError>("{}: another process has it; give another MASTER_PORT, or a {}",
                           error.what(), "LOCKSTEP_JOB_SECRET");
  }
}

/// Rank 0 may only be about to offer its key.
Socket connect_to_desk(const Address& store, int rank, const Deadline& deadline) {
  while (true) {
    try {
      return connect_under(name_of(store), "rank 0", deadline);
    } catch (const EnvironmentError& error) {
      if (!deadline.passed()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      fail<PeerLost>(
          "rank {}: what listens on {} hands out no job key on this host within {:g} s ({}); "
          "another program has the port of rank 0, or rank 0 is in another container: give another "
          "MASTER_PORT, or give all ranks the same LOCKSTEP_JOB_SECRET",
          rank, store.text(), deadline.seconds(), error.what());
    }
  }
}

}  // namespace

KeyDesk::KeyDesk(const Address& store, const JobKey& key)
    : key_(key), listener_(listen_at(store)) {}

bool KeyDesk::serve() const {
  bool refused = false;
  for (int i = 0; i < kServedAtOnce; ++i) {
    const std::optional<Socket> socket = accept_from(listener_);
    if (!socket) break;
    const bool own = has_same_user(*socket);
    refused = refused || !own || key_.source != JobKey::Source::rank_0;
    if (!own) continue;
    try {
      send_all(*socket, bytes_of(message_of(key_)), Deadline(0));
    } catch (const PeerLost&) {
      // It does not want the key any more.
    }
  }
  return refused;
}

JobKey ask_for_key(const Address& store, int rank, const Deadline& deadline) {
  const Socket socket = connect_to_desk(store, rank, deadline);
  require(
      has_same_user(socket),
      "rank {}: a process of another user offers the job key of {}; {}, and another MASTER_PORT",
      rank, store.text(), kGiveSecret);
  std::string message(1 + kJobKeyBytes, '\0');
  receive_all(socket, writable_bytes_of(message), deadline);
  const auto source = static_cast<JobKey::Source>(message[0]);
  require(source == JobKey::Source::rank_0, "rank 0 has {}, this rank {} has none; {}",
          describe(source), rank, kGiveSecret);
  return {source, message.substr(1)};
}

}  // namespace lockstep
