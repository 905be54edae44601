#include "common/kernels/sim/sim_device.h"

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/core/tensor.h"
#include "common/kernels/sim/sim_kernels.h"
#include "common/kernels/sim/sim_stream.h"

namespace lockstep::sim {
namespace {

class SimDevice final : public Device {
 public:
  SimDevice(const DeviceId& id, const DeviceOptions& options)
      : Device(id, options),
        host_(options.sim_host ? options.sim_host : make_host()),
        profile_(read_profile(id.profile)),
        kernels_(make_kernels()) {}
  ~SimDevice() override { close_streams(); }

  std::string description() const override {
    return fmt::format("simulated {} ({})", profile_->device, profile_->source);
  }
  Kernels& kernels() override { return *kernels_; }
  std::shared_ptr<void> allocate_host(size_t bytes) override {
    return {allocate_aligned(bytes), release_aligned};
  }
  bool computes() const override { return false; }
  int64_t simulated_memory() const override { return profile_->memory_bytes; }
  int64_t now_ns() const override { return host_->now(); }
  void made_batch(int64_t samples) override { host_->work(profile_->make_batch_ns(samples)); }
  void require_readable(const void* data, const Shape& shape, bool floating) const override {
    // States and counts were written by the host, or by the few kernels that do compute.
    const bool known = shape.elements() == 1 && host_->known(data) != nullptr;
    if (floating ? known : SimHost::is_memory(data)) return;
    fail<BadInput>(
        "{}: a tensor {} has no values, since a simulated device computes none, and the host asks "
        "for them; give --devices cpu:0",
        name(), shape.text());
  }

 private:
  std::unique_ptr<StreamBackend> make_stream(std::string name) override {
    return std::make_unique<SimStream>(*this, std::move(name), *host_, *profile_);
  }

  const std::shared_ptr<SimHost> host_;
  const std::shared_ptr<const Profile> profile_;
  const std::unique_ptr<Kernels> kernels_;
};

}  // namespace

std::unique_ptr<Device> open_sim_device(const DeviceId& id, const DeviceOptions& options) {
  return std::make_unique<SimDevice>(id, options);
}

std::shared_ptr<SimHost> make_host() { return std::make_shared<SimHost>(); }

}  // namespace lockstep::sim
