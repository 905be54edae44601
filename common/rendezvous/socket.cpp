#include "common/rendezvous/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "common/core/parse.h"

namespace lockstep {

// --- Addresses ----------------------------------------------------------------------------------

std::string Address::text() const {
  const bool v6 = host.find(':') != host.npos;
  return v6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

std::string without_brackets(std::string_view host) {
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  return std::string(host);
}

Address parse_address(std::string_view text, const std::string& what) {
  const size_t colon = text.rfind(':');
  const std::string_view host = text.substr(0, colon);
  const bool bracketed = host.starts_with('[') && host.ends_with(']');
  // Without brackets it is unclear where an IPv6 host ends and its port begins.
  const bool ambiguous = !bracketed && host.find(':') != host.npos;
  require(colon != text.npos && !without_brackets(host).empty() && !ambiguous,
          "{}: found '{}', expected HOST:PORT, as in 127.0.0.1:29500 or [::1]:29500", what, text);
  return {without_brackets(host),
          parse_whole(text.substr(colon + 1), what + ": the port", 0, kLargestPort)};
}

bool is_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.") ||
         host.starts_with("::ffff:127.");
}

// --- Sockets ------------------------------------------------------------------------------------

namespace {

using AddressOf = int (*)(int, sockaddr*, socklen_t*);

Address numbers_of(int fd, AddressOf address_of, const std::string& whose) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto* generic = reinterpret_cast<sockaddr*>(&storage);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (address_of(fd, generic, &size) != 0) {
    fail<EnvironmentError>("{} of a connection cannot be read: {}", whose, errno_text(errno));
  }
  const int error = ::getnameinfo(generic, size, host.data(), host.size(), port.data(), port.size(),
                                  NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) {
    fail<EnvironmentError>("{} of a connection has no numbers: {}", whose, ::gai_strerror(error));
  }
  return {host.data(), parse_whole(port.data(), whose + ": port", 0, kLargestPort)};
}

}  // namespace

Address Socket::local_address() const {
  return numbers_of(fd(), &::getsockname, "this side's address");
}

Address Socket::peer_address() const {
  return numbers_of(fd(), &::getpeername, "the other side's address");
}

void Socket::fail_closed(int error) const {
  const std::string why = error == 0 ? "" : fmt::format(" ({})", errno_text(error));
  fail<ConnectionClosed>("{} closed the connection{}", peer_, why);
}

void Socket::shut_down() const {
  if (is_open()) ::shutdown(fd(), SHUT_RDWR);
}

size_t Socket::send_some(std::span<const std::byte> bytes) const {
  while (true) {
    const ssize_t sent = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) return static_cast<size_t>(sent);
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) fail_closed(errno);
  }
}

size_t Socket::receive_some(std::span<std::byte> bytes) const {
  while (true) {
    const ssize_t came = ::recv(fd(), bytes.data(), bytes.size(), 0);
    if (came > 0) return static_cast<size_t>(came);
    if (came == 0) fail_closed(0);
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) fail_closed(errno);
  }
}

WakeUp::WakeUp() : event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (event_.get() < 0) fail<EnvironmentError>("cannot make an eventfd: {}", errno_text(errno));
}

void WakeUp::set() const { ::eventfd_write(event_.get(), 1); }

bool wait_ready(std::span<pollfd> entries, const Deadline& deadline) {
  while (true) {
    const int ready = ::poll(entries.data(), entries.size(), deadline.poll_ms());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail<EnvironmentError>("poll: {}", errno_text(errno));
    if (deadline.passed()) return false;
  }
}

// --- How a connection comes about ---------------------------------------------------------------

namespace {

constexpr int kStreamFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr double kRetrySeconds = 0.02;  // between attempts to connect
// How long the first attempt waits for an answer. Where a listener's queue is full, by a flood of
// strangers, the system itself would try again after 1, 3 and 7 s.
constexpr double kFirstAttemptSeconds = 0.1, kNextAttempt = 1.3;

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

// --- Between the processes of one host ----------------------------------------------------------

namespace {

/// A name as the system takes it: abstract, because its first letter is a zero.
struct UnixName {
  explicit UnixName(const std::string& name) {
    require(name.size() + 1 <= sizeof address.sun_path,
            "a socket's name has {} letters, expected at most {}", name.size(),
            sizeof address.sun_path - 1);
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{};
  socklen_t size = 0;
};

Socket new_socket() {
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) fail<EnvironmentError>("cannot make a socket: {}", errno_text(errno));
  return socket;
}

/// One byte, and room for a descriptor that travels with it.
struct DescriptorMessage {
  DescriptorMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  std::byte byte{};
  iovec part{&byte, 1};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

}  // namespace

Socket listen_under(const std::string& name) {
  Socket socket = new_socket();
  const UnixName at(name);
  if (::bind(socket.fd(), at.get(), at.size) != 0 || ::listen(socket.fd(), SOMAXCONN) != 0) {
    fail<EnvironmentError>("cannot listen under the name {}: {}", name, errno_text(errno));
  }
  return socket;
}

Socket connect_under(const std::string& name, const std::string& peer, const Deadline& deadline) {
  const UnixName to(name);
  while (true) {
    Socket socket = new_socket();
    socket.name_peer(peer);
    if (::connect(socket.fd(), to.get(), to.size) == 0) return socket;
    const bool busy = errno == EAGAIN || errno == EINTR;  // too many wait there to be accepted
    if (!busy || deadline.passed()) {
      fail<EnvironmentError>("cannot reach {}'s Unix socket: {}", peer, errno_text(errno));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool has_same_user(const Socket& socket) {
  ucred other{};
  socklen_t size = sizeof other;
  return ::getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
}

void send_descriptor(const Socket& socket, const Descriptor& descriptor) {
  DescriptorMessage message;
  cmsghdr* const rights = CMSG_FIRSTHDR(&message.header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = descriptor.get();
  std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  while (::sendmsg(socket.fd(), &message.header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) {
      fail<ConnectionClosed>("{} closed the connection ({})", socket.peer(), errno_text(errno));
    }
    fail<EnvironmentError>("cannot send {} a descriptor: {}", socket.peer(), errno_text(errno));
  }
}

Descriptor receive_descriptor(const Socket& socket, const Deadline& deadline) {
  pollfd entry{socket.fd(), POLLIN, 0};
  if (!wait_ready({&entry, 1}, deadline)) {
    fail<PeerLost>("{} sent no descriptor within {:g} s", socket.peer(), deadline.seconds());
  }
  DescriptorMessage message;
  const ssize_t came = ::recvmsg(socket.fd(), &message.header, MSG_CMSG_CLOEXEC);
  if (came <= 0) {
    fail<ConnectionClosed>("{} closed the connection{}", socket.peer(),
                           came < 0 ? " (" + errno_text(errno) + ")" : "");
  }
  const cmsghdr* const rights = CMSG_FIRSTHDR(&message.header);
  if (rights == nullptr || rights->cmsg_type != SCM_RIGHTS) {
    fail<EnvironmentError>(
        "{} sent bytes, expected a descriptor; is the limit of open files "
        "reached?",
        socket.peer());
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
  return Descriptor(fd);
}

// --- Whole messages -----------------------------------------------------------------------------

namespace {

using Clock = std::chrono::steady_clock;

/// How long the thread looks for the next bytes before it sleeps: waking up takes longer.
constexpr std::chrono::microseconds kSpin{50};

size_t move_some(const Sending& message) { return message.socket->send_some(message.bytes); }
size_t move_some(const Receiving& message) { return message.socket->receive_some(message.bytes); }

/// The messages of one direction, and what is left of each.
template <class Message>
class Direction {
 public:
  explicit Direction(std::span<const Message> whole)
      : whole_(whole), left_(whole.begin(), whole.end()) {}

  bool done() const { return first_unfinished() == left_.end(); }
  /// Moves what can be moved now; false if that is nothing.
  bool move() {
    bool moved = false;
    for (Message& message : left_) {
      if (!is_next(message)) continue;
      const size_t bytes = move_some(message);
      message.bytes = message.bytes.subspan(bytes);
      moved = moved || bytes > 0;
    }
    return moved;
  }
  void add_to(std::vector<pollfd>& entries, short event) const {
    for (const Message& message : left_) {
      if (is_next(message)) entries.push_back({message.socket->fd(), event, 0});
    }
  }
  /// "rank 2 did not answer within 5 s: 100 of 4096 bytes came"
  [[noreturn]] void fail_late(const Deadline& deadline, const char* before,
                              const char* after) const {
    const Message& late = *first_unfinished();
    const size_t size = whole_[static_cast<size_t>(&late - left_.data())].bytes.size();
    fail<PeerLost>("{} did not answer within {:g} s: {}{} of {} bytes{}", late.socket->peer(),
                   deadline.seconds(), before, size - late.bytes.size(), size, after);
  }

 private:
  auto first_unfinished() const {
    return std::find_if(left_.begin(), left_.end(),
                        [](const Message& message) { return !message.bytes.empty(); });
  }
  /// True if it is not done, but all before it on its socket are.
  bool is_next(const Message& message) const {
    const auto first = std::find_if(left_.begin(), left_.end(), [&](const Message& other) {
      return other.socket == message.socket && !other.bytes.empty();
    });
    return first != left_.end() && &*first == &message;
  }

  std::span<const Message> whole_;
  std::vector<Message> left_;
};

}  // namespace

void transfer(std::span<const Sending> out, std::span<const Receiving> in,
              const Deadline& deadline) {
  Direction<Sending> sending(out);
  Direction<Receiving> receiving(in);
  Clock::time_point moved = Clock::now();
  while (true) {
    const bool sent = sending.move(), received = receiving.move();
    if (sending.done() && receiving.done()) return;
    if (deadline.passed()) {
      if (!receiving.done()) receiving.fail_late(deadline, "", " came");
      sending.fail_late(deadline, "it took ", "");
    }
    if (sent || received) moved = Clock::now();
    if (Clock::now() - moved < kSpin) {
      std::this_thread::yield();
      continue;
    }
    std::vector<pollfd> entries;
    sending.add_to(entries, POLLOUT);
    receiving.add_to(entries, POLLIN);
    wait_ready(entries, deadline);
  }
}

}  // namespace lockstep
