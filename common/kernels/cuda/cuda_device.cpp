// GPUs as devices.

#include <cstdlib>
#include <optional>

#include "common/core/error.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/cuda/cuda.h"
#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/cuda_stream.h"
#include "common/kernels/cuda/peer_access.h"

namespace lockstep::cuda {
namespace {

/// Memory that a device's streams allocate from. It keeps what is freed, so that only the first
/// step asks the driver.
PoolHandle make_pool(int index, const std::string& device) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {cudaMemLocationTypeDevice, index};
  cudaMemPool_t made = nullptr;
  check(cudaMemPoolCreate(&made, &properties), "cudaMemPoolCreate", device);
  PoolHandle pool(made);
  uint64_t keep_all = UINT64_MAX;
  check(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &keep_all),
        "cudaMemPoolSetAttribute", device);
  return pool;
}

/// ", CUDA_VISIBLE_DEVICES is '1'", if it is set.
std::string visible_devices() {
  const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
  return value == nullptr ? "" : fmt::format(", CUDA_VISIBLE_DEVICES is '{}'", value);
}

/// Why there are no GPUs, in words.
std::string reason_for(cudaError_t status) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);  // 0 where there is no driver
  cudaRuntimeGetVersion(&runtime);
  if (status == cudaErrorInsufficientDriver && driver == 0) return "no NVIDIA driver";
  if (status == cudaErrorInsufficientDriver) {
    return fmt::format("the NVIDIA driver is for CUDA {}.{}, this build needs {}.{}: update it",
                       driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  }
  if (status == cudaErrorNoDevice || status == cudaSuccess) {
    return "no NVIDIA GPU" + visible_devices();
  }
  return describe(status, "cudaGetDeviceCount");
}

/// As cuda::availability(): this is the part inside the library.
Availability gpus() {
  int count = 0;  // stays as it is where there is no driver
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return {.devices = count};
  cudaGetLastError();
  int driver = 0;
  cudaDriverGetVersion(&driver);
  const bool none = driver == 0 || status == cudaSuccess || status == cudaErrorNoDevice;
  return {.reason = reason_for(status), .unusable = !none};
}

constexpr int kTf32Major = 8;  // compute capability of the first GPUs with TF32 (Ampere)

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, const DeviceOptions& options)
      : Device({DeviceId::Kind::cuda, index}, options), index_(index) {
    check(cudaSetDevice(index_), "cudaSetDevice", name());
    check(cudaGetDeviceProperties(&properties_, index_), "cudaGetDeviceProperties", name());
    refuse_unless_kernels_fit();
    refuse_cudnn_of_another_cuda();
    require(!options.tf32 || properties_.major >= kTf32Major,
            "--tf32: {} is a {} of compute capability {}.{}, and TF32 arithmetic begins with {}.0; "
            "leave --tf32 out",
            name(), properties_.name, properties_.major, properties_.minor, kTf32Major);
    pool_ = make_pool(index_, name());
    peers_.emplace(index_, pool_.get());
  }
  ~CudaDevice() override { close_streams(); }

  std::string description() const override {
    return fmt::format("cuda ({}, {}{}{})", properties_.name, kernels_->engine(),
                       options().tf32 ? ", TF32" : "", options().nchw ? ", NCHW" : "");
  }
  std::string hardware() const override {
    std::string uuid = "GPU";
    for (size_t i = 0; i < sizeof properties_.uuid.bytes; ++i) {
      const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
      uuid += fmt::format("{}{:02x}", dash ? "-" : "",
                          static_cast<unsigned char>(properties_.uuid.bytes[i]));
    }
    return uuid;
  }
  Kernels& kernels() override { return *kernels_; }

  std::shared_ptr<void> allocate_host(size_t bytes) override {
    check(cudaSetDevice(index_), "cudaSetDevice", name());
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      fail<EnvironmentError>(
          "{}: no room for {:.1f} MiB of page-locked host memory (cudaHostAlloc: {}); use a "
          "smaller "
          "batch, fewer --workers or a smaller --prefetch-factor",
          name(), double(bytes) / 1048576.0, cudaGetErrorName(status));
    }
    check(status, "cudaHostAlloc", name());
    return {memory, [this](void* freed) {
              drain();
              // An error stays with the thread, and the next launch would be blamed for it.
              if (cudaFreeHost(freed) != cudaSuccess) cudaGetLastError();
            }};
  }

  std::string memory_note() const override {
    size_t free = 0, total = 0;
    if (cudaSetDevice(index_) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess) {
      return {};
    }
    return fmt::format("; {:.1f} of the GPU's {:.1f} MiB are free", double(free) / 1048576.0,
                       double(total) / 1048576.0);
  }

 private:
  void refuse_unless_kernels_fit() const {
    const cudaError_t status = kernels_fit_current_device();
    const bool unfit = status == cudaErrorNoKernelImageForDevice ||
                       status == cudaErrorInvalidDeviceFunction ||
                       status == cudaErrorUnsupportedPtxVersion;
    if (unfit) {
      cudaGetLastError();
      fail<EnvironmentError>(
          "{}: this build has no code for {} (compute capability {}.{}; {}); configure it anew "
          "with "
          "-Dgpu_archs={}{}",
          name(), properties_.name, properties_.major, properties_.minor, cudaGetErrorName(status),
          properties_.major, properties_.minor);
    }
    check(status, "cudaFuncGetAttributes", name());
  }

  /// Its file's name does not say it, and its own errors do not either.
  void refuse_cudnn_of_another_cuda() const {
    const size_t theirs = cudnnGetCudartVersion() / 1000, ours = CUDART_VERSION / 1000;
    if (theirs == ours) return;
    fail<EnvironmentError>(
        "{}: {} is for CUDA {}, this build for CUDA {}; install the cuDNN for CUDA {}, or name its "
        "folder with -Dgpu_roots=, and configure the build anew",
        name(), kernels_->engine(), theirs, ours, ours);
  }

  std::unique_ptr<StreamBackend> make_stream(std::string stream_name) override {
    return std::make_unique<CudaStream>(*this, std::move(stream_name), index_, pool_.get(), state_);
  }

  int index_;
  cudaDeviceProp properties_{};
  PoolHandle pool_;
  std::optional<PeerAccess> peers_;
  DeviceState state_;
  const std::unique_ptr<Kernels> kernels_ = make_kernels();
};

std::unique_ptr<Device> open_gpu(int index, const DeviceOptions& options) {
  const Availability found = gpus();
  if (found.devices == 0) {
    fail<EnvironmentError>("cuda:{}: {}; use --devices cpu:0", index, found.reason);
  }
  if (index >= found.devices) {
    fail<EnvironmentError>("cuda:{}: found {} GPU{} (cuda:0 to cuda:{}{}); name one of them", index,
                           found.devices, found.devices == 1 ? "" : "s", found.devices - 1,
                           visible_devices());
  }
  return std::make_unique<CudaDevice>(index, options);
}

}  // namespace

extern "C" void lockstep_cuda_backend(Backend& backend) { backend = {gpus, open_gpu}; }

}  // namespace lockstep::cuda
