// What a user reads when a GPU, its driver or a library fails: planted on the CUDA model.

#include <filesystem>
#include <sstream>

#include "tests/gpu/gpu_test_support.h"
#include "tests/support/data_test_files.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using testing::ProcessResult;

struct Fault {
  std::string variable;  // of the model's environment
  std::string value;
  int status;            // of the program
  std::string expected;  // in its one line
  std::string option = "--no-dropout";
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all{
      {"CUDA_MODEL_DRIVER", "0", 1, "cuda:0: no NVIDIA driver; use --devices cpu:0"},
      {"CUDA_MODEL_DRIVER", "12040", 1,
       "the NVIDIA driver is for CUDA 12.4, this build needs 13.0"},
      {"CUDA_MODEL_DEVICES", "0", 1, "cuda:0: no NVIDIA GPU"},
      {"CUDA_VISIBLE_DEVICES", "", 1, "no NVIDIA GPU, CUDA_VISIBLE_DEVICES is ''"},
      {"CUDA_MODEL_FAULT", "cudaGetDeviceCount:802:0", 1, "nvidia-fabricmanager, running and of"},
      {"CUDA_MODEL_FAULT", "cudaGetDeviceCount:804:0", 1,
       "take .../cuda/compat out of the library"},
      {"CUDA_MODEL_FAULT", "cudaGetDeviceCount:34:0", 1, "take .../stubs out of LD_LIBRARY_PATH"},
      {"CUDA_MODEL_FAULT", "cudaGetDeviceCount:805:0", 1, "start MPS's control daemon"},
      {"CUDA_MODEL_FAULT", "cudaGetDeviceCount:999:0", 1, "see nvidia-smi and dmesg"},
      {"CUDA_MODEL_CUDNN_CUDART", "12040", 1,
       " is for CUDA 12, this build for CUDA 13; install the"},
      {"CUDA_MODEL_CAPABILITY", "6.1", 1, "compute capability 6.1"},
      {"CUDA_MODEL_CAPABILITY", "7.5", 1,
       "--tf32: cuda:0 is a CUDA model on the CPU of compute capability 7.5, and TF32 arithmetic "
       "begins with 8.0; leave --tf32 out",
       "--tf32"},
      {"CUDA_MODEL_MEMORY_MIB", "30", 2, "MiB are free; use a smaller batch or model"},
      {"CUDA_MODEL_FAULT", "cudaSetDevice:46", 2, "cudaErrorDevicesUnavailable"},
      {"CUDA_MODEL_FAULT", "cudaFuncGetAttributes:222", 1, "cudaErrorUnsupportedPtxVersion"},
      {"CUDA_MODEL_FAULT", "cudaHostAlloc:2", 1, "page-locked host memory"},
      {"CUDA_MODEL_FAULT", "cudaMemcpyAsync:1:4", 2, "cudaMemcpyAsync: cudaErrorInvalidValue"},
      {"CUDA_MODEL_FAULT", "kernel:9:20", 2, "launch of "},
      {"CUDA_MODEL_FAULT", "kernel:700:5:async", 2, "cudaErrorIllegalAddress"},
      {"CUDA_MODEL_FAULT", "kernel:702:30:async", 2, "cudaErrorLaunchTimeout"},
      {"CUDA_MODEL_FAULT", "cublasCreate:3", 2, "cublasCreate: CUBLAS_STATUS_ALLOC_FAILED"},
      {"CUDA_MODEL_FAULT", "cublasSgemm:13:2", 2, "cublasSgemm: CUBLAS_STATUS_EXECUTION_FAILED"},
      {"CUDA_MODEL_FAULT", "cudnnCreate:1001", 2, "cudnnCreate: CUDNN_STATUS_NOT_INITIALIZED"},
      {"CUDA_MODEL_FAULT", "cudnnConvolutionBackwardFilter:5000:3", 2,
       "cudnnConvolutionBackwardFilter: CUDNN_STATUS_EXECUTION_FAILED"},
      {"CUDA_MODEL_FAULT", "cudnnGetConvolutionBackwardFilterWorkspaceSize:3000:0", 2,
       "cuda:0: cuDNN runs no deterministic algorithm for a 5x5 convolution of "},
      {"CUDA_MODEL_FAULT", "cudnnConvolutionBackwardData:3004:0", 2,
       "cuDNN runs no deterministic algorithm for a "},
      {"CUDA_MODEL_FAULT", "cudnnGetConvolutionForwardWorkspaceSize:4000", 2,
       "cudnnGetConvolution...WorkspaceSize: CUDNN_STATUS_INTERNAL_ERROR"},
      {"CUDA_MODEL_FAULT", "cudaStreamEndCapture:901", 2, "cudaStreamEndCapture: ", "--graph"},
      {"CUDA_MODEL_FAULT", "cudaGraphInstantiate:2", 2, "cudaGraphInstantiate: ", "--graph"},
      {"CUDA_MODEL_FAULT", "cudaGraphLaunch:719:2", 2, "cudaGraphLaunch: ", "--graph"},
  };
  return all;
}

ProcessResult run_with(const Fault& fault, const std::filesystem::path& folder,
                       const std::string& stage = "01-single-gpu",
                       const std::string& devices = "cuda:0") {
  return testing::run_process(
      {testing::stage_binary(stage), "--devices", devices, "--data", "synthetic:48:16",
       "--batch-size", "16", "--save", (folder / "w").string(), "--metrics",
       (folder / "m").string(), fault.option},
      60, {{fault.variable, fault.value}});
}

/// Lines that are no warnings.
int64_t errors_in(const std::string& text) {
  std::istringstream lines(text);
  int64_t count = 0;
  for (std::string line; std::getline(lines, line);) count += !line.starts_with("warning: ");
  return count;
}

TEST_CASE("Every failure of a GPU is one line with the call, the code and what to do",
          "[cuda][stage][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real GPU fails when it wants");
  }
  const testing::TempDir folder;
  for (const Fault& fault : faults()) {
    const ProcessResult run = run_with(fault, folder.path());
    INFO(fault.variable << "=" << fault.value << ": " << testing::story(run));
    CHECK(run.status == fault.status);
    CHECK_FALSE(run.timed_out);
    CHECK_THAT(run.err, Catch::Matchers::ContainsSubstring(fault.expected));
    CHECK_THAT(run.err, Catch::Matchers::ContainsSubstring(";"));  // what to do
    CHECK(errors_in(run.err) == 1);
    CHECK(folder.names().empty());
  }
}

TEST_CASE("GPUs that are there and cannot be used are not left aside silently",
          "[cuda][stage][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real GPU fails when it wants");
  }
  const auto run_by_default = [](const std::string& variable, const std::string& value) {
    const ProcessResult run =
        testing::run_process({testing::stage_binary("01-single-gpu"), "--data", "synthetic:64:32"},
                             60, {{variable, value}});
    INFO(testing::story(run));
    CHECK(run.status == 0);
    CHECK_THAT(run.out, Catch::Matchers::ContainsSubstring("cpu ("));
    return run.err;
  };
  const std::string said = run_by_default("CUDA_MODEL_FAULT", "cudaGetDeviceCount:802:0");
  CHECK_THAT(said, Catch::Matchers::StartsWith("warning: CPU devices are used, for the GPUs cannot "
                                               "be: cudaGetDeviceCount: cudaErrorSystemNotReady"));
  CHECK(std::count(said.begin(), said.end(), '\n') == 1);
  CHECK(run_by_default("CUDA_MODEL_DRIVER", "0").empty());
  CHECK(run_by_default("CUDA_MODEL_DEVICES", "0").empty());
}

TEST_CASE("A GPU that fails while another one waits for it ends the run, named",
          "[cuda][stage][dataparallel][ddp][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real GPU fails when it wants");
  }
  const testing::TempDir folder;
  const auto check = [&](int kernel, const std::string& option, const std::string& stage) {
    const std::string fault = fmt::format("kernel:719:{}:async", kernel);
    const ProcessResult run =
        run_with({"CUDA_MODEL_FAULT", fault, 2, "", option}, folder.path(), stage, "cuda:0,cuda:1");
    INFO(stage << ", " << fault << ": " << testing::story(run));
    CHECK_FALSE(run.timed_out);
    CHECK(run.status == 2);
    CHECK_THAT(run.err, Catch::Matchers::ContainsSubstring("cuda:") &&
                            Catch::Matchers::ContainsSubstring("cudaErrorLaunchFailure"));
    const bool one_line = std::count(run.err.begin(), run.err.end(), '\n') == 1;
    CHECK((one_line || stage == "04-ddp"));  // there each rank says it, and the flight recorder
    CHECK(folder.names().empty());
  };
  // Of either GPU, in any phase; of either rank's, which are processes.
  for (int kernel = 30; kernel < 130; kernel += testing::full_campaign() ? 10 : 30)
    check(kernel, "--no-dropout", "02-dataparallel");
  for (const int kernel : {20, 40}) check(kernel, "--backend=shm", "04-ddp");
}

TEST_CASE("A convolution whose bias cuDNN cannot add is trained all the same",
          "[cuda][stage][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real cuDNN cannot be told to refuse");
  }
  const testing::TempDir folder;
  // Not supported, its sub-code for layouts, and arguments that this cuDNN does not know.
  for (const char* code : {"3000", "3004", "2000"}) {
    const ProcessResult run = run_with(
        {"CUDA_MODEL_FAULT", std::string("cudnnConvolutionBiasActivationForward:") + code, 0, ""},
        folder.path());
    INFO(testing::story(run));
    CHECK(run.status == 0);
  }
}

TEST_CASE("An algorithm that cuDNN refuses is passed over for its next proposal",
          "[cuda][stage][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real cuDNN cannot be told to refuse");
  }
  const testing::TempDir folder;
  for (const char* pass : {"Forward", "BackwardData", "BackwardFilter"}) {
    for (const std::string& call : {fmt::format("cudnnGetConvolution{}WorkspaceSize", pass),
                                    fmt::format("cudnnConvolution{}", pass)}) {
      const ProcessResult run =
          run_with({"CUDA_MODEL_FAULT", call + ":3000", 0, ""}, folder.path());
      INFO(call << ": " << testing::story(run));
      CHECK(run.status == 0);
      // That a proposal does not fit is not said, unless cuDNN should always have it.
      CHECK(
          (run.err.empty() || run.err.starts_with("warning: cuda:0: cuDNN refuses algorithm 1 ")));
    }
  }
}

TEST_CASE("That cuDNN refuses even what it always had is said", "[cuda][stage][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real cuDNN cannot be told to refuse");
  }
  const testing::TempDir folder;
  const testing::ScopedEnvironment nothing("CUDA_MODEL_PROPOSALS", "0");
  const ProcessResult run =
      run_with({"CUDA_MODEL_FAULT", "cudnnConvolutionBackwardData:3000", 0, ""}, folder.path());
  INFO(testing::story(run));
  CHECK(run.status == 0);
  CHECK_THAT(run.err, Catch::Matchers::ContainsSubstring(
                          "warning: cuda:0: cuDNN refuses algorithm 1 with the channels last for "
                          "gradients of inputs of convolutions; the next way is tried"));
}

TEST_CASE("Where cuDNN proposes nothing for float32, what it always had serves, in either layout",
          "[cuda][stage][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real cuDNN cannot be told to refuse");
  }
  std::vector<std::string> weights;
  for (const char* proposals : {"1", "0", "-1"}) {
    const testing::TempDir folder;
    const ProcessResult run = run_with({"CUDA_MODEL_PROPOSALS", proposals, 0, ""}, folder.path());
    INFO(proposals << ": " << testing::story(run));
    REQUIRE(run.status == 0);
    weights.push_back(testing::read_text(folder / "w"));
    // Said once for each pass, whatever the number of layers and steps.
    const std::vector<std::string> said{
        "cuDNN proposes no deterministic algorithm in float32 for {} of convolutions; one that it "
        "has for all is taken",
        "with the channels last for {} of convolutions; the next way is tried",
        "{} of convolutions are computed on copies with the channels first"};
    const long expected = proposals == std::string("1") ? 0 : proposals == std::string("0") ? 1 : 3;
    CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 3 * expected);
    for (const char* computes : {"outputs", "gradients of inputs", "gradients of weights"}) {
      for (size_t i = 0; i < said.size(); ++i) {
        const std::string text = fmt::format(fmt::runtime(said[i]), computes);
        CHECK((run.err.find(text) != std::string::npos) == (long(i) < expected));
      }
    }
  }
  CHECK((weights[1] == weights[0]));  // the model adds in one order, whichever the algorithm
  CHECK((weights[2] == weights[0]));
}

TEST_CASE(
    "A pass asks for algorithms when it is needed: the first layer has no gradient of its input",
    "[cuda][stage][gpufaults]") {
  LOCKSTEP_NEEDS_GPU();
  if (!testing::is_model(*open_device(testing::kGpu, {}))) {
    LOCKSTEP_SKIP("not the CUDA model: a real cuDNN cannot be told to refuse");
  }
  const testing::TempDir folder;
  // The seed network has two convolutions, on one stream; evaluation has batches of its own size.
  // Each asks for algorithms of both layouts.
  const auto asks = [&](const char* pass, int nth) {
    return run_with({"CUDA_MODEL_FAULT",
                     fmt::format("cudnnGetConvolution{}Algorithm_v7:4000:{}", pass, nth), 2, ""},
                    folder.path())
               .status != 0;
  };
  CHECK(asks("BackwardData", 2));
  CHECK_FALSE(asks("BackwardData", 3));
  CHECK(asks("BackwardFilter", 4));
  CHECK_FALSE(asks("BackwardFilter", 5));
}

}  // namespace
}  // namespace lockstep
