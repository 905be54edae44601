// Devices by name.

#include <vector>

#include "common/core/error.h"
#include "common/kernels/cpu/cpu_device.h"
#include "common/kernels/cuda/cuda.h"
#include "common/kernels/devices.h"
#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using cpu::EngineKind;
using testing::message_of;

}  // namespace

// --- Devices -------------------------------------------------------------------------------------

TEST_CASE("An operation takes no tensor of another device, which names both", "[kernels]") {
  const Devices devices = open_devices(parse_devices("cpu:0,cpu:1"), {});
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Tensor here = Tensor::from_host(streams[0], {2, 3}, std::vector<Real>(6, 1));
  const Tensor there = Tensor::from_host(streams[1], {2, 3}, std::vector<Real>(6, 1));
  Kernels& kernels = streams[0].kernels();
  const auto refused = [](const auto& work) {
    CHECK(message_of<BadInput>(work) ==
          "a tensor [2, 3] is on cpu:1, and an operation of cpu:0 uses it; copy it there first");
  };
  refused([&] { kernels.add(streams[0], there, here); });
  refused([&] { kernels.add(streams[0], here, there); });
  refused([&] { kernels.log_softmax(streams[0], there, here); });
  refused([&] {
    const MatMul shape{
        .m = 2, .n = 2, .k = 3, .transpose_a = false, .transpose_b = true, .accumulate = false};
    kernels.matmul(streams[0], shape, here, there, Tensor::empty(streams[0], {2, 2}));
  });
  streams[0].synchronize();
  CHECK(here.to_host() == std::vector<Real>(6, 1));  // nothing was enqueued
}

TEST_CASE("Device lists are read as they are written", "[core]") {
  const auto names = [](std::string_view list) {
    std::vector<std::string> names;
    for (const DeviceId& id : parse_devices(list)) names.push_back(id.name());
    return names;
  };
  using Names = std::vector<std::string>;
  CHECK(names("cpu:0") == Names{"cpu:0"});
  CHECK(names("cpu") == Names{"cpu:0"});
  CHECK(names("cuda") == Names{"cuda:0"});
  CHECK(names("cpu:0,cpu:1,cpu:1023") == Names{"cpu:0", "cpu:1", "cpu:1023"});
  CHECK(names("cuda:1,cuda:0") == Names{"cuda:1", "cuda:0"});
  CHECK(names("cuda:0,cuda:0") == Names{"cuda:0", "cuda:0"});  // replicas may share a GPU
  CHECK(parse_devices("cuda:3")[0] == DeviceId{DeviceId::Kind::cuda, 3});
  // Simulated devices are counted.
  CHECK(names("sim:2") == Names{"sim:0", "sim:1"});
  CHECK(names("sim:h100") == Names{"sim:h100:0"});
  CHECK(names("sim:h100x2,sim:box") == Names{"sim:h100:0", "sim:h100:1", "sim:box:2"});
  CHECK(names("sim:./px3/my.jsonx1") == Names{"sim:./px3/my.json:0"});
}

TEST_CASE("Device lists that name no device are refused in one line", "[core]") {
  const auto error = [](std::string_view list) {
    return message_of<BadInput>([&] { parse_devices(list); });
  };
  const auto not_a_device = [](const std::string& text) {
    return "--devices: '" + text +
           "' is not a device; write cpu:N or cuda:N with N from 0 to 1023, separated by commas, "
           "or sim:N for N simulated ones";
  };
  CHECK(error("") == "--devices: the list is empty; write for instance cpu:0 or cuda:0,cuda:1");
  for (const char* text : {"gpu:0", "CPU:0", "cpu:", "cpu:-1", "cpu:+1", "cpu:1024", "cpu:1x",
                           "cpu:1:2", " cpu:0", "cpu:0 ", ":0", "0", "cpu:99999999999999999999"}) {
    CHECK(error(text) == not_a_device(text));
  }
  for (const char* text : {"", "0", "1025", "h100x0", "x2", "h100x1025"}) {
    CHECK(error("sim:" + std::string(text)) ==
          "--devices: 'sim:" + std::string(text) +
              "': expected sim:N or sim:PROFILExN with N from 1 to 1024, for instance sim:2 or "
              "sim:h100x8");
  }
  CHECK(error("cpu:0,") == not_a_device(""));
  CHECK(error(",cpu:0") == not_a_device(""));
  CHECK(error("cpu:0, cpu:1") == not_a_device(" cpu:1"));
  CHECK(error("cpu:0;cpu:1") == not_a_device("cpu:0;cpu:1"));
  CHECK(error("cpu:0,cuda:1") ==
        "--devices: cpu:0 and cuda:1 are of different kinds; all devices of a run are of one kind");
  CHECK(error("cuda:0,cuda:1,cpu:2") ==
        "--devices: cuda:0 and cpu:2 are of different kinds; all devices of a run are of one kind");
}

TEST_CASE("An open CPU device says what it is", "[core]") {
  const auto one = open_device({DeviceId::Kind::cpu, 3}, {});
  CHECK(one->name() == "cpu:3");
  CHECK(one->id() == DeviceId{DeviceId::Kind::cpu, 3});
  const std::string engine = one->kernels().engine();
  CHECK(one->description() == "cpu (" + engine + ", 1 thread)");
  const auto reference = cpu::open_cpu_device(0, {.threads = 2}, EngineKind::reference);
  CHECK(reference->description() == "cpu (reference, 2 threads)");
  CHECK(reference->options().threads == 2);
  const Stream stream = reference->create_stream("compute");
  CHECK(stream.name() == "compute");
  CHECK(&stream.device() == reference.get());
  CHECK(&stream.kernels() == &reference->kernels());
  CHECK(reference->streams().size() == 1);
}

TEST_CASE("Without a GPU the CPU is chosen, and a GPU that is asked for is a clear error",
          "[core][row128]") {
  const std::vector<DeviceId> defaults = default_devices(2);
  const std::string reason = why_no_gpu();
  const int gpus = cuda::availability().devices;
  const DeviceId absent{DeviceId::Kind::cuda, gpus};  // the first that is not there
  const std::string error = message_of<EnvironmentError>([&] { open_device(absent, {}); });
  CHECK_THAT(error, StartsWith(absent.name() + ": "));
  CHECK(error.find('\n') == std::string::npos);
  CHECK(EnvironmentError(error).exit_status() == 1);
  if (gpus == 0) {
    CHECK(reason != "");
    CHECK_THAT(error, ContainsSubstring(reason) && ContainsSubstring("--devices cpu:0"));
    CHECK(defaults == parse_devices("cpu:0,cpu:1"));
    CHECK(default_devices(1) == parse_devices("cpu:0"));
  } else {
    CHECK(reason == "");
    CHECK(static_cast<int>(defaults.size()) == gpus);
    for (const DeviceId& id : defaults) CHECK(id.kind == DeviceId::Kind::cuda);
  }
}

}  // namespace lockstep
