#pragma once
// Devices: where memory is and streams run. `cuda:0` is a GPU; `cpu:0`, `cpu:1`, ... are virtual
// devices, each with compute threads of its own; `sim:2` are two devices that are only simulated.
// There is no global current device: code that works on a device holds the device or one of its
// streams.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/core/host.h"
#include "common/core/stream.h"

namespace lockstep {

class Kernels;
class Shape;
class SimHost;

/// The name of a device: "cpu:1", "cuda:0", "sim:h100:3".
struct DeviceId {
  enum class Kind { cpu, cuda, sim };
  Kind kind = Kind::cpu;
  int index = 0;
  // For simulated devices: rates (kernels/sim/profile.h), and how many devices their host has.
  std::string profile{};
  int beside = 1;

  std::string name() const;
  friend bool operator==(const DeviceId&, const DeviceId&) = default;
};

/// Reads "cpu:0,cpu:1" or "cuda:0" ("cpu" is "cpu:0"). Simulated devices are not named but counted:
/// "sim:2" are two, "sim:h100x8" eight with the rates of the profile h100. Throws BadInput for
/// anything else, and for a mixture of kinds. Opening a device shows whether it exists.
std::vector<DeviceId> parse_devices(std::string_view list);

/// Bytes in use on one device, and their peak. Every allocation counts: parameters, activations,
/// and the workspaces of libraries. A buffer counts when the host asks for it (in stream order), so
/// that the peak is the same in every run. A trace shows the buffer when its stream reaches the
/// allocation (StreamBackend::memory_changes). Relaxed: counters must not order anything else.
class MemoryCounter {
 public:
  void add(int64_t bytes);
  void subtract(int64_t bytes) { current_.fetch_sub(bytes, std::memory_order_relaxed); }
  int64_t current() const { return current_.load(std::memory_order_relaxed); }
  int64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  void reset_peak() { peak_.store(current(), std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> current_{0};
  std::atomic<int64_t> peak_{0};
};

/// How a device is opened.
struct DeviceOptions {
  int threads = 1;     // compute threads of a CPU device
  bool trace = false;  // keep a Span per operation
  bool tf32 = false;   // let a GPU round the inputs of products to 10 bits of mantissa
  bool nchw = false;   // ask first for algorithms of a GPU's convolutions that want channels first
  int neighbours = 0;  // devices that were opened together with this one
  bool bind = false;   // CPU devices that are opened together keep to equal parts of the cores
  Cores cores{};       // that a CPU device's threads keep to; empty: all
  std::shared_ptr<SimHost> sim_host{};  // of simulated devices that are opened together
};

/// One device. Owns its streams; outlives every tensor on it.
class Device {
 public:
  virtual ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceId& id() const { return id_; }
  std::string name() const { return id_.name(); }
  /// For the summary: "cpu (oneDNN, 1 thread)", "cuda (NVIDIA H100)".
  virtual std::string description() const = 0;
  /// Identifies the hardware within its host: the UUID of a GPU, since two processes may know the
  /// same GPU by different names.
  virtual std::string hardware() const { return name(); }

  /// A new stream of this device; `name` is its lane in the trace.
  Stream create_stream(std::string name);
  /// The operations of this device (kernels/kernels.h).
  virtual Kernels& kernels() = 0;
  /// Host memory for asynchronous copies to and from this device (page-locked on CUDA, plain on the
  /// CPU). Freeing the memory waits for what the device's streams have queued. The memory must be
  /// freed before the device.
  virtual std::shared_ptr<void> allocate_host(size_t bytes) = 0;
  /// Text that an out-of-memory error adds to its sizes: "; 1.5 of the GPU's 81079.0 MiB are free".
  virtual std::string memory_note() const { return {}; }

  /// Whether kernels compute. Those of a simulated device only take their time (kernels/sim/).
  virtual bool computes() const { return true; }
  /// Bytes of memory of the device that is simulated; more can be allocated. 0 for other devices.
  virtual int64_t simulated_memory() const { return 0; }
  /// The clock of the host that works with this device, ns.
  virtual int64_t now_ns() const { return steady_ns(); }
  /// Tells that the host has made a batch of so many samples. A simulated host's clock moves on.
  virtual void made_batch(int64_t /*samples*/) {}
  /// Throws BadInput, with the tensor's shape, if the host could read no values at `data`.
  /// `floating`: the values are fractions, not whole numbers.
  virtual void require_readable(const void* /*data*/, const Shape&, bool /*floating*/) const {}

  MemoryCounter& memory() { return memory_; }
  /// The part of memory() that workspaces of libraries take on a CPU. A GPU's workspaces count as
  /// other memory, and a simulated device has none.
  MemoryCounter& workspaces() { return workspaces_; }
  const DeviceOptions& options() const { return options_; }
  const std::vector<std::unique_ptr<StreamBackend>>& streams() const { return streams_; }

 protected:
  Device(DeviceId id, DeviceOptions options);
  virtual std::unique_ptr<StreamBackend> make_stream(std::string name) = 0;
  /// Waits for what the streams have queued: copies may still read host memory that is about to be
  /// freed. Destructors call it.
  void drain() const noexcept;
  /// Drains and joins the streams; a derived class calls it before its own members are destroyed.
  void close_streams();

 private:
  DeviceId id_;
  DeviceOptions options_;
  MemoryCounter memory_, workspaces_;
  std::vector<std::unique_ptr<StreamBackend>> streams_;
};

}  // namespace lockstep
