#include "common/system/secrets.h"

#include <sodium.h>

#include "common/core/error.h"

namespace lockstep {
namespace {

const unsigned char* bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}
unsigned char* bytes(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

}  // namespace

std::string proofs_availability() {
  return ::sodium_init() < 0 ? "libsodium finds no random numbers on this system" : "";
}

std::string random_bytes(size_t count) {
  if (const std::string why = proofs_availability(); !why.empty()) throw EnvironmentError(why);
  std::string out(count, '\0');
  ::randombytes_buf(out.data(), out.size());
  return out;
}

std::string hmac(std::string_view key, std::string_view message) {
  static_assert(crypto_auth_hmacsha256_BYTES == kProofBytes);
  crypto_auth_hmacsha256_state state;
  std::string out(kProofBytes, '\0');
  ::crypto_auth_hmacsha256_init(&state, bytes(key), key.size());
  ::crypto_auth_hmacsha256_update(&state, bytes(message), message.size());
  ::crypto_auth_hmacsha256_final(&state, bytes(out));
  return out;
}

bool same_secret(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ::sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace lockstep
