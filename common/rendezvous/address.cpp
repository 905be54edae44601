#include "common/rendezvous/address.h"

#include <algorithm>

#include "common/core/error.h"
#include "common/core/parse.h"

namespace lockstep {

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

}  // namespace lockstep
