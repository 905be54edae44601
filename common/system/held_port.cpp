#include "common/system/held_port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "common/core/error.h"

namespace lockstep {

HeldPort::HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};  // any address, port 0: the kernel chooses
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  const int on = 1;
  if (!socket_.is_open() ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(socket_.get(), where, size) != 0 || ::getsockname(socket_.get(), where, &size) != 0) {
    fail<EnvironmentError>("found no free port: {}; name one that is free", errno_text(errno));
  }
  number_ = ntohs(address.sin_port);
}

}  // namespace lockstep
