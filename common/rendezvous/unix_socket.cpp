#include "common/rendezvous/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

namespace lockstep {
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

}  // namespace lockstep
