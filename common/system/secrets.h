#pragma once
// Proofs that somebody knows a secret, without telling the secret.

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

/// The reason why this build can prove nothing; empty if it can. Without libsodium the next three
/// functions throw EnvironmentError with this text.
std::string proofs_availability();

/// Bytes that nobody can guess.
std::string random_bytes(size_t count);
/// HMAC-SHA-256 (RFC 2104): 32 bytes that nobody can compute without the key. A key may have any
/// length.
std::string hmac(std::string_view key, std::string_view message);
/// Whether two texts are the same. Takes the same time wherever they differ, so that nobody can
/// guess a proof byte by byte.
bool same_secret(std::string_view a, std::string_view b);

constexpr size_t kProofBytes = 32;  // of hmac()

/// The environment variable in which `lockstep launch` gives its ranks their key, in hex digits.
inline constexpr const char* kLauncherKey = "LOCKSTEP_LAUNCHER_KEY";

}  // namespace lockstep
