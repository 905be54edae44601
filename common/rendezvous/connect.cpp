#include "common/rendezvous/connect.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

constexpr int kStreamFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr double kRetrySeconds = 0.02;  // between attempts to connect
// How long the first attempt waits for an answer. Where a listener's queue is full, by a flood of
// strangers, the system itself would try again after 1, 3 and 7 s.
constexpr double kFirstAttemptSeconds = 0.1, kNextAttempt = 1.3;

// --- Names -------------------------------------------------------------------------------------

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// The socket addresses that a host has. A name server that does not answer may still come up, so
/// the list is empty then; a host that is not known stays unknown.
AddressList look_up(const Address& address) {
  addrinfo wanted{};
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const std::string port = std::to_string(address.port);
  const int error = ::getaddrinfo(address.host.c_str(), port.c_str(), &wanted, &list);
  AddressList found(list, &::freeaddrinfo);
  if (error != 0 && error != EAI_AGAIN) {
    fail<EnvironmentError>(
        "cannot resolve the host name '{}': {}; check MASTER_ADDR, or give the address in numbers",
        address.host, error == EAI_SYSTEM ? errno_text(errno) : ::gai_strerror(error));
  }
  return found;
}

// --- Connecting --------------------------------------------------------------------------------

/// TCP lets a socket connect to itself if nobody listens on a port that the system also gives to
/// clients; a client that retries long enough will do so some day.
bool is_connected_to_itself(const Socket& socket) {
  return socket.local_address() == socket.peer_address();
}

/// 0, or why it failed.
int try_connect(const addrinfo& to, const Deadline& deadline, Socket& socket) {
  socket = Socket(::socket(to.ai_family, kStreamFlags, 0));
  if (!socket.is_open()) return errno;
  if (::connect(socket.fd(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return errno;
    pollfd entry{socket.fd(), POLLOUT, 0};
    if (!wait_ready({&entry, 1}, deadline)) return ETIMEDOUT;
  }
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return error;
  try {
    return is_connected_to_itself(socket) ? ECONNREFUSED : 0;
  } catch (const EnvironmentError&) {
    return ECONNRESET;  // already gone again
  }
}

int count(const addrinfo* list) { return list == nullptr ? 0 : 1 + count(list->ai_next); }

/// 0, or why the last of the addresses failed; EAI_AGAIN (which is no errno) without addresses.
int try_all(const AddressList& list, const Deadline& deadline, Socket& socket) {
  int error = EAI_AGAIN;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    // One silent address must not use up the time of the addresses after it.
    error = try_connect(*entry, Deadline(deadline.seconds_left() / count(entry)), socket);
    if (error == 0) return 0;
  }
  return error;
}

[[noreturn]] void fail_connect(const Address& address, const Deadline& deadline, int error) {
  const std::string where = fmt::format("{} within {:g} s", address.text(), deadline.seconds());
  if (error == EAI_AGAIN) {
    fail<EnvironmentError>(
        "cannot resolve the host name '{}': no name server answered for {}; give the address in "
        "numbers",
        address.host, where);
  }
  if (error == ECONNREFUSED) {
    fail<EnvironmentError>(
        "cannot connect to {}: {}: nothing listens there; was rank 0 started, and is this its "
        "address?",
        where, errno_text(error));
  }
  if (error == ETIMEDOUT) {
    fail<EnvironmentError>(
        "cannot connect to {}: no answer at all; is that host up, and does a firewall let the port "
        "through?",
        where);
  }
  fail<EnvironmentError>("cannot connect to {}: {}; check address and network", where,
                         errno_text(error));
}

void send_at_once(const Socket& socket) {
  const int on = 1;  // small messages must not wait for an acknowledgement
  ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// --- Listening ---------------------------------------------------------------------------------

/// 0, or why it failed.
int try_listen(const addrinfo& at, Socket& socket) {
  socket = Socket(::socket(at.ai_family, kStreamFlags, 0));
  if (!socket.is_open()) return errno;
  const int on = 1, off = 0;
  // Connections of a job that has just ended do not block the port; a listening socket does.
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (at.ai_family == AF_INET6) {
    ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // "::" is IPv4 too
  }
  if (::bind(socket.fd(), at.ai_addr, at.ai_addrlen) != 0) return errno;
  return ::listen(socket.fd(), SOMAXCONN) == 0 ? 0 : errno;
}

[[noreturn]] void fail_listen(const Address& address, int error) {
  const std::string where =
      address.host.empty() ? fmt::format("port {}", address.port) : address.text();
  fail<EnvironmentError>(
      "cannot listen on {}: errno {}: {}; {}", where, error, errno_text(error),
      error == EADDRINUSE
          ? "another job has this port: end it, give another MASTER_PORT, or let the system choose "
            "(port 0, or --standalone of the launcher)"
          : "give the address of an interface of this host and a port that you may use");
}

}  // namespace

Socket listen_on(const Address& address) {
  // All interfaces: by IPv6, which includes IPv4, or by IPv4 if the host has nothing else.
  const std::vector<std::string> hosts = address.host.empty()
                                             ? std::vector<std::string>{"::", "0.0.0.0"}
                                             : std::vector<std::string>{address.host};
  int error = EADDRNOTAVAIL;
  for (const std::string& host : hosts) {
    const AddressList list = look_up({host, address.port});
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
      Socket socket;
      error = try_listen(*entry, socket);
      if (error == 0) return socket;
      if (error == EADDRINUSE) fail_listen(address, error);  // clients would reach the other
    }
  }
  fail_listen(address, error);
}

bool is_own_address(const std::string& host) {
  addrinfo wanted{};
  wanted.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(host.c_str(), "0", &wanted, &list) != 0) return false;
  const AddressList found(list, &::freeaddrinfo);
  // An address that is not its own is refused by the system, whatever the port.
  const Socket socket(::socket(list->ai_family, kStreamFlags, 0));
  if (!socket.is_open() || ::bind(socket.fd(), list->ai_addr, list->ai_addrlen) != 0) return false;
  const std::string own = socket.local_address().host;
  return own != "0.0.0.0" && own != "::";
}

std::optional<Socket> accept_from(const Socket& listener) {
  Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.is_open()) {
    send_at_once(socket);
    return socket;
  }
  const int error = errno;
  if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
    fail<EnvironmentError>("cannot accept a connection: {}; raise the limit of open files",
                           errno_text(error));
  }
  return std::nullopt;  // nobody there, or gone again
}

Socket connect_to(const Address& address, const Deadline& deadline) {
  double patience = kFirstAttemptSeconds;
  while (true) {
    Socket socket;
    const Deadline attempt(std::min(patience, deadline.seconds_left()));
    const int error = try_all(look_up(address), attempt, socket);
    if (error == 0) {
      send_at_once(socket);
      socket.name_peer(address.text());
      return socket;
    }
    if (deadline.passed()) fail_connect(address, deadline, error);
    if (error == ETIMEDOUT) patience *= kNextAttempt;
    const double pause = std::min(kRetrySeconds, deadline.seconds_left());
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
  }
}

}  // namespace lockstep
