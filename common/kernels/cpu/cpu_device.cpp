#include "common/kernels/cpu/cpu_device.h"

#include "common/core/cpu_stream.h"
#include "common/core/error.h"
#include "common/core/host.h"
#include "common/kernels/cpu/engine.h"
#include "common/kernels/kernels.h"

namespace lockstep::cpu {
namespace {

EngineMaker engine_of(EngineKind kind) {
  const EngineMaker best = onednn_engine();
  return kind == EngineKind::best && best.make != nullptr ? best : reference_engine();
}

class CpuDevice final : public Device {
 public:
  CpuDevice(int index, const DeviceOptions& options, EngineKind engine)
      : Device({DeviceId::Kind::cpu, index}, options), kernels_(make_kernels(engine_of(engine))) {}
  ~CpuDevice() override { close_streams(); }

  std::string description() const override {
    const int threads = options().threads;
    return fmt::format("cpu ({}, {} thread{})", kernels_->engine(), threads,
                       threads == 1 ? "" : "s");
  }
  Kernels& kernels() override { return *kernels_; }
  std::string memory_note() const override { return memory_limit_note().data(); }
  std::shared_ptr<void> allocate_host(size_t bytes) override {
    return {allocate_aligned(bytes), [this](void* memory) {
              drain();
              release_aligned(memory);
            }};
  }

 private:
  std::unique_ptr<StreamBackend> make_stream(std::string name) override {
    return std::make_unique<CpuStream>(*this, std::move(name));
  }

  const std::unique_ptr<Kernels> kernels_;
};

}  // namespace

std::unique_ptr<Device> open_cpu_device(int index, const DeviceOptions& options,
                                        EngineKind engine) {
  return std::make_unique<CpuDevice>(index, options, engine);
}

}  // namespace lockstep::cpu
