#pragma once
// What the operating system knows about this process.

#include <cstdint>

namespace lockstep {

/// The most memory that this process ever had in RAM, in bytes.
int64_t peak_rss_bytes();
/// Seconds since this process was started (resolution 10 ms).
double seconds_since_start();

}  // namespace lockstep
