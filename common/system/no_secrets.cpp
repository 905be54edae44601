// In place of secrets.cpp where libsodium was not found.

#include "common/core/error.h"
#include "common/system/secrets.h"

namespace lockstep {

std::string proofs_availability() {
  return "this build has no libsodium (Debian: apt-get install libsodium-dev, then build again)";
}

std::string random_bytes(size_t) { throw EnvironmentError(proofs_availability()); }
std::string hmac(std::string_view, std::string_view) {
  throw EnvironmentError(proofs_availability());
}
bool same_secret(std::string_view, std::string_view) {
  throw EnvironmentError(proofs_availability());
}

}  // namespace lockstep
