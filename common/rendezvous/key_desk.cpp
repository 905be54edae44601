#include "common/rendezvous/key_desk.h"

#include <chrono>
#include <thread>

#include "common/core/error.h"
#include "common/sockets/transfer.h"
#include "common/sockets/unix_socket.h"
#include "common/sockets/wire.h"

namespace lockstep {
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
