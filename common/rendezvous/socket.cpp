#include "common/rendezvous/socket.h"

#include <netdb.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "common/core/parse.h"

namespace lockstep {
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

}  // namespace lockstep
