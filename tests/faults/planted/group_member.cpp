// One rank of a group of processes, for tests: does what the words of its command line say, one
// after another, and ends as a stage does.
//
//   backend=B timeout=S init=METHOD rank=N world-size=N local-rank=N   options of the group
//   join            makes the group
//   devices=LIST    takes its device of these (otherwise cpu:0), on connecting
//   connect         connects the device
//   reduce=N double=N average=N   sums, or averages, N numbers and waits for it
//   broadcast=N     N numbers of rank 0
//   meet            all ranks wait for each other, on the stream
//   barrier         the same through the store
//   say=TEXT        prints it
//   shell=COMMAND   a program that the rank starts
//   file=PATH       makes an empty file
//   wait=PATH       until that file is there
//   kill, stop      SIGKILL, SIGSTOP to itself
//   leave           ends the group
//   N:WORD          the word, on rank N only

#include <fmt/format.h>
#include <signal.h>

#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/comm/process_group.h"
#include "common/core/error.h"
#include "common/core/tensor.h"
#include "common/kernels/devices.h"
#include "common/options/report.h"

namespace lockstep {
namespace {

class Member {
 public:
  void run(std::string word) {
    const size_t colon = word.find(':');
    if (colon == 1 && std::isdigit(word[0])) {
      if (group_->rank() != word[0] - '0') return;
      word = word.substr(2);
    }
    const size_t sign = std::min(word.find('='), word.size());
    const std::string value = sign < word.size() ? word.substr(sign + 1) : "";
    const auto action = actions_.find(word.substr(0, sign));
    require(action != actions_.end(), "group-member: unknown word '{}'", word);
    action->second(value);
  }

 private:
  template <class T>
  void reduce(const std::string& count, Reduction reduction = Reduction::sum) {
    const int64_t n = std::stoll(count);
    const auto x = BasicTensor<T>::from_host(*stream_, {n}, std::vector<T>(size_t(n), T(1)));
    ranks_->all_reduce(*stream_, x, reduction);
    const T expected = reduction == Reduction::average ? T(1) : T(group_->world_size());
    for (const T value : x.to_host()) {
      require(value == expected, "group-member: {} ones add up to {}", expected, value);
    }
  }
  void broadcast(const std::string& count) {
    const int64_t n = std::stoll(count);
    ranks_->broadcast(*stream_, Tensor::from_host(*stream_, {n}, std::vector<Real>(size_t(n))), 0);
    stream_->synchronize();
  }
  void join() { group_.reset(new ProcessGroup(init_process_group(options_))); }
  void connect() {
    device_ = open_device(group_->device_of(devices_), {});
    stream_ = std::make_unique<Stream>(device_->create_stream("communication"));
    ranks_ = group_->connect(*device_);
  }
  static void wait(const std::string& path) {
    const Deadline deadline(120);
    while (!deadline.passed() && !std::filesystem::exists(path)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  ProcessGroupOptions options_{.program = "group-member WORDS..."};
  std::vector<DeviceId> devices_ = std::vector<DeviceId>(16);
  std::unique_ptr<ProcessGroup> group_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Communicator> ranks_;
  std::map<std::string, std::function<void(const std::string& value)>> actions_{
      {"backend", [this](const auto& value) { options_.backend = value; }},
      {"timeout", [this](const auto& value) { options_.timeout_seconds = std::stod(value); }},
      {"init", [this](const auto& value) { options_.init_method = value; }},
      {"rank", [this](const auto& value) { options_.rank = std::stoi(value); }},
      {"world-size", [this](const auto& value) { options_.world_size = std::stoi(value); }},
      {"local-rank", [this](const auto& value) { options_.local_rank = std::stoi(value); }},
      {"devices", [this](const auto& value) { devices_ = parse_devices(value); }},
      {"join", [this](const auto&) { join(); }},
      {"connect", [this](const auto&) { connect(); }},
      {"reduce", [this](const auto& value) { reduce<float>(value); }},
      {"double", [this](const auto& value) { reduce<double>(value); }},
      {"average", [this](const auto& value) { reduce<float>(value, Reduction::average); }},
      {"broadcast", [this](const auto& value) { broadcast(value); }},
      {"meet", [this](const auto&) { ranks_->barrier(*stream_), stream_->synchronize(); }},
      {"barrier", [this](const auto&) { group_->barrier(); }},
      {"say", [](const auto& value) { fmt::print("{}\n", value), std::fflush(stdout); }},
      {"shell", [](const auto& value) { require(std::system(value.c_str()) == 0, "shell"); }},
      {"file", [](const auto& value) { std::ofstream{value}; }},
      {"wait", [](const auto& value) { wait(value); }},
      {"kill", [](const auto&) { ::raise(SIGKILL); }},
      {"stop", [](const auto&) { ::raise(SIGSTOP); }},
      {"leave", [this](const auto&) { ranks_.reset(), group_->end(); }},
  };
};

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::report_uncaught_errors();
  static lockstep::Member& member = *new lockstep::Member;  // without "leave" it just ends
  for (int i = 1; i < argc; ++i) member.run(argv[i]);
}
