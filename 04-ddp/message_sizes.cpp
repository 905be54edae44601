// Measures the all-reduce over message sizes: the ring and the naive all-reduce written out here,
// compared with the library's. Beside the times are the bytes that one all-reduce sends, counted
// where they leave rank 0.
//
//   build/04-ddp/message-sizes --metrics sizes.json
//
// Two ranks, unless a launcher starts more. NCCL's calls are timed on the GPU, many together, those
// of the other backends one by one on the host.

#include <algorithm>
#include <cstdio>
#include <string>

#include "04-ddp/all_reduce.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/training/program.h"

namespace lockstep {
namespace {

struct SizesOptions {
  RankOptions rank_options;
  Options common;  // of these: devices, no_bind
  std::vector<int> kib{1, 4, 16, 64, 256, 1024, 4096, 16384};
  std::vector<AllReduceKind> kinds{AllReduceKind::ring, AllReduceKind::naive,
                                   AllReduceKind::library};
  int rounds = 20;
  std::string metrics;

  void add_to(OptionParser& parser) {
    parser.add("--devices", common.devices,
               "one per rank of this host; all GPUs, else CPU devices");
    add_no_bind(parser, common.no_bind);
    parser.add("--kib", kib, "message sizes in KiB", {1, 1 << 20});
    parser.add(
        "--all-reduce", kinds,
        "algorithms to measure: library (the backend's own), or ring or naive of all_reduce.cpp");
    parser.add("--rounds", rounds, "measurements of each size; the median counts", {5, 10000});
    parser.add_output("--metrics", metrics, "write the rows to this file, as JSON");
    rank_options.add_to(parser);
  }
};

constexpr int kCallsBetweenEvents = 50;
constexpr int kUntimedRounds = 2;  // they touch new memory

/// Seconds of one all-reduce by the host's clock (that of a simulated device, if it is one), from
/// when all ranks have arrived until the host knows that it has ended.
double seconds_of_one(AllReduce& all_reduce, Communicator& comm, Stream stream, const Tensor& x) {
  comm.barrier(stream);
  stream.synchronize();
  const int64_t begin = stream.device().now_ns();
  all_reduce(x);
  stream.synchronize();
  return double(stream.device().now_ns() - begin) * 1e-9;
}

/// Seconds of one all-reduce of many that follow each other on the stream, by the GPU's clock. The
/// host only launches NCCL's calls: to launch one and to wait for it takes the host about as long
/// as a small message takes the GPU, and is no part of a training step, which waits for none.
double seconds_of_many(AllReduce& all_reduce, Communicator& comm, Stream stream, const Tensor& x) {
  comm.barrier(stream);
  const TimedEvent begin = stream.record_time();
  for (int call = 0; call < kCallsBetweenEvents; ++call) all_reduce(x);
  return stream.record_time().seconds_since(begin) / kCallsBetweenEvents;
}

/// The median of what `seconds_of` finds in the rounds.
template <class SecondsOf>
double median_seconds(int rounds, SecondsOf seconds_of) {
  std::vector<double> seconds;
  for (int round = 0; round < rounds + kUntimedRounds; ++round) {
    const double time = seconds_of();
    if (round >= kUntimedRounds) seconds.push_back(time);
  }
  std::nth_element(seconds.begin(), seconds.begin() + rounds / 2, seconds.end());
  return seconds[size_t(rounds / 2)];
}

void print_header(bool by_events) {
  print_clean(
      "through by     ranks      message        median   bus bandwidth      sent by rank 0   (by "
      "{})\n",
      by_events ? "events on the GPU, many calls between two" : "the host's clock, each call");
}

void print_row(const nlohmann::json& row) {
  print_clean("{:<7} {:<7} {:>4} {:>8} KiB  {:10.1f} us  {:8.2f} GB/s  {:12.1f} KiB\n",
              row.at("backend").get<std::string>(), row.at("all_reduce").get<std::string>(),
              row.at("world_size").get<int>(), row.at("bytes").get<int64_t>() / 1024,
              1e6 * row.at("seconds").get<double>(),
              row.at("bus_bytes_per_second").get<double>() / 1e9,
              row.at("sent_bytes").get<double>() / 1024);
  std::fflush(stdout);
}

void measure(const SizesOptions& options, ProcessGroup& group) {
  const std::unique_ptr<Device> device = open_device_of_rank(options.common, group);
  const std::unique_ptr<Communicator> communicator = group.connect(*device);
  Communicator& comm = *communicator;
  const Stream stream = device->create_stream("communication");
  const bool by_events = group.backend() == "nccl";
  const auto seconds_of = by_events ? seconds_of_many : seconds_of_one;
  nlohmann::json rows = nlohmann::json::array();
  if (group.rank() == 0) print_header(by_events);
  for (const int kib : options.kib) {
    const int64_t count = int64_t{kib} * 1024 / int64_t(sizeof(Real));
    const Tensor x = Tensor::empty(stream, {count});
    stream.kernels().fill(stream, 0, x);
    for (const AllReduceKind kind : options.kinds) {
      AllReduce all_reduce(comm, kind, stream);
      const int64_t sent_before = comm.bytes_sent(Purpose::gradients);
      const double seconds =
          median_seconds(options.rounds, [&] { return seconds_of(all_reduce, comm, stream, x); });
      const int calls = (options.rounds + kUntimedRounds) * (by_events ? kCallsBetweenEvents : 1);
      const double sent = double(comm.bytes_sent(Purpose::gradients) - sent_before) / calls;
      // Computed: what a ring would send and receive in this time (NCCL's "bus bandwidth").
      const double per_second =
          2.0 * (comm.world_size() - 1) / comm.world_size() * 1024.0 * double(kib) / seconds;
      rows.push_back({{"backend", group.backend()},
                      {"all_reduce", name_of(kind)},
                      {"world_size", comm.world_size()},
                      {"timed_by", by_events ? "events" : "host"},
                      {"bytes", int64_t{kib} * 1024},
                      {"seconds", seconds},
                      {"sent_bytes", sent},
                      {"counted_in", comm.bytes_counted_in()},
                      {"bus_bytes_per_second", per_second}});
      if (group.rank() == 0) print_row(rows.back());
    }
  }
  if (group.rank() == 0 && !options.metrics.empty()) write_json(options.metrics, rows);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  SizesOptions options;
  OptionParser parser("message-sizes", "Measures all-reduces over message sizes.");
  options.add_to(parser);
  return run_rank_program(parser, argc, argv, options.rank_options, options.common.devices,
                          [&](ProcessGroup& group) { measure(options, group); });
}
