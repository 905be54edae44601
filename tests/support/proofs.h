#pragma once
// Job keys in tests: a build without libsodium can prove none.

#include "common/rendezvous/job_key.h"
#include "common/system/secrets.h"
#include "tests/support/catch.h"

namespace lockstep::testing {

/// A key where this build has proofs; none where a job trusts its network.
inline JobKey some_key() { return proofs_availability().empty() ? random_job_key() : JobKey(); }

}  // namespace lockstep::testing

/// Leaves a test case in a build that can prove nothing.
#define LOCKSTEP_NEEDS_PROOFS()                                                    \
  do {                                                                             \
    if (!::lockstep::proofs_availability().empty()) LOCKSTEP_SKIP("no libsodium"); \
  } while (false)
