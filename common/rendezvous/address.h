#pragma once
// HOST:PORT, and the whole numbers that come with it as text.

#include <string>
#include <string_view>

namespace lockstep {

/// Where something listens.
struct Address {
  std::string host;  // a name or a number; IPv6 without brackets
  int port = 0;      // 0 to listen: the system chooses

  /// "node7:29500", "[::1]:29500"
  std::string text() const;
  bool operator==(const Address&) const = default;
};

/// The address that Address::text() wrote; brackets around a host are accepted even where they are
/// not needed.
/// `what` names it in errors. Throws BadInput.
Address parse_address(std::string_view text, const std::string& what);

/// "::1" for "[::1]"; any other host stays as it is.
std::string without_brackets(std::string_view host);

/// True for an address that is reachable only from its own host: localhost, 127.x.y.z, ::1.
bool is_loopback(std::string_view host);

constexpr int kLargestPort = 65535;

}  // namespace lockstep
