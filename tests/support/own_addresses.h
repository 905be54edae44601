#pragma once
// The addresses that this host has.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <string>
#include <vector>

namespace lockstep::testing {

/// IPv4, of all interfaces that have one: "127.0.0.1", "192.0.2.7".
inline std::vector<std::string> own_addresses() {
  std::vector<std::string> own;
  ifaddrs* interfaces = nullptr;
  if (::getifaddrs(&interfaces) != 0) return own;
  for (const ifaddrs* each = interfaces; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    const auto* const address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
    std::array<char, INET_ADDRSTRLEN> text{};
    own.emplace_back(::inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size()));
  }
  ::freeifaddrs(interfaces);
  return own;
}

}  // namespace lockstep::testing
