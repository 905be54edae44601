#pragma once
// The costs of a simulated device's work: a small file of rates (tools/profiles/).
//
// The form of such a file, JSON. Times are in seconds, rates per second:
//   {"device": "NVIDIA H100 SXM",           what it is
//    "source": "from data sheets, ...",     where the figures come from: every output says it
//    "memory_bytes": 85899345920,
//    "operations": {"default": {"seconds": 3e-6, "flops": 4e13, "bytes": 2.6e12},
//                   "conv2d": {...},         by their names in traces, and, if they differ,
//                   "conv2d 3x3": {...}},    by the windows of convolutions
//    "crowded": [1, 1.8],                   how many times as long an operation takes where one,
//    two, ...
//                                           devices of a host are at work; may be left out
//    "lanes": 16,                           numbers of a vector: a convolution computes so many
//                                           channels of its result at once; may be left out (1)
//    "wake_seconds": 2e-5,                  what a stream that waits for an event pays when it
//                                           comes; may be left out
//    "launch_seconds": 4e-6,                what the host pays for each operation
//    "batch_seconds": 2e-5,                 what the host pays for a batch, and
//    "sample_seconds": 1e-7,                for each sample of it; may be left out
//    "links": {"host": {"seconds": 1e-5, "bytes": 5e10},      between host and device
//              "device": {...},             between two devices of a host
//              "network": {...}},           between two hosts
//    "sources": ["links: ...", ...]}        of the figures, for people; may be left out

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

/// An operation takes `seconds`, and then the longer of the times for its flops and its bytes.
struct OperationCost {
  double seconds = 0, flops = 1, bytes = 1;
};

/// A message takes `seconds`, and then its bytes' time.
struct LinkCost {
  double seconds = 0, bytes = 1;
};

enum class Link { host, device, network };
constexpr auto words_of(Link) { return std::array{"host", "device", "network"}; }

struct Profile {
  std::string name, device, source;
  int64_t memory_bytes = 0;
  std::map<std::string, OperationCost, std::less<>> operations;  // "default": all others
  std::vector<double> crowded;  // empty: devices do not slow each other down
  int64_t lanes = 1;
  int64_t wake_ns = 0;
  int64_t launch_ns = 0;
  double batch_seconds = 0, sample_seconds = 0;
  std::array<LinkCost, 3> links;  // by Link

  /// The factor by which a convolution with so many channels in its result takes longer, because
  /// the last lanes of a vector are empty.
  double padding_factor(int64_t channels) const;
  /// The cost of an operation of this name, or of a convolution whose window has so many pixels.
  const OperationCost& cost_of(const std::string& op, int64_t window = 0) const;
  /// Nanoseconds of an operation with this cost, while so many devices of a host are at work.
  int64_t operation_ns(const OperationCost& cost, double flops, double bytes,
                       int devices = 1) const;
  /// Nanoseconds in which the host makes a batch.
  int64_t make_batch_ns(int64_t samples) const;
  /// Nanoseconds for which so many bytes use a link, and the nanoseconds after that until the other
  /// side has the last of the bytes.
  int64_t transfer_ns(Link link, double bytes) const;
  int64_t latency_ns(Link link) const;
  /// The sum of both: the nanoseconds of one message.
  int64_t message_ns(Link link, double bytes) const {
    return latency_ns(link) + transfer_ns(link, bytes);
  }
};

/// Reads the profile of that name, or the file if `name` is a path. Throws BadInput, naming file
/// and entry, if that is no profile; EnvironmentError if the file cannot be read.
std::shared_ptr<const Profile> read_profile(const std::string& name);

}  // namespace lockstep
