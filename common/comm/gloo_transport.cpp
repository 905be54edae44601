#include "common/comm/gloo_transport.h"

#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <mutex>

#include "common/comm/gloo_collectives.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// The group's store, with the interface that Gloo needs.
class StoreForGloo final : public ::gloo::rendezvous::Store {
 public:
  explicit StoreForGloo(const RendezvousStore& store) : store_(store) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set("gloo/" + key, std::string(data.begin(), data.end()));
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = store_.get("gloo/" + key);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) store_.get("gloo/" + key);
  }
  void wait(const std::vector<std::string>& keys, const milliseconds&) override { wait(keys); }

 private:
  const RendezvousStore& store_;
};

/// Newer Gloo reports its connections on std::cout, which belongs to the program's own output.
/// Several ranks may connect in one process.
class StdoutForOthers {
 public:
  StdoutForOthers() {
    const std::lock_guard lock(mutex);
    if (users++ == 0) before = std::cout.rdbuf(std::cerr.rdbuf());
  }
  ~StdoutForOthers() {
    const std::lock_guard lock(mutex);
    if (--users == 0) std::cout.rdbuf(before);
  }
  StdoutForOthers(const StdoutForOthers&) = delete;
  StdoutForOthers& operator=(const StdoutForOthers&) = delete;

 private:
  static inline std::mutex mutex;
  static inline int users = 0;
  static inline std::streambuf* before = nullptr;
};

}  // namespace

void lockstep_connect_gloo(std::shared_ptr<HostTransport>& connected, int rank, int world_size,
                           const RendezvousStore& store, const std::string& host,
                           double timeout_seconds) {
  const StdoutForOthers stdout_for_others;
  const SigpipeHeldBack held_back;
  try {
    ::gloo::transport::tcp::attr attributes;
    attributes.hostname = host;
    const auto device = ::gloo::transport::tcp::CreateDevice(attributes);
    const auto context = std::make_shared<::gloo::rendezvous::Context>(rank, world_size);
    const milliseconds timeout(static_cast<int64_t>(std::ceil(1e3 * timeout_seconds)));
    context->setTimeout(timeout / 5 + milliseconds(1));  // Gloo waits five times as long to connect
    StoreForGloo for_gloo(store);
#ifdef GLOO_SHARED_STORE
    context->connectFullMesh(std::make_shared<StoreForGloo>(for_gloo), device);
#else
    auto known = device;
    context->connectFullMesh(for_gloo, known);
#endif
    context->setTimeout(timeout);
    connected = gloo_collectives(context);
  } catch (
      const ::gloo::EnforceNotMet& error) {  // not a gloo::Exception: the system refuses something
    fail<EnvironmentError>(
        "rank {}: Gloo could not connect the {} ranks: {}; see ulimit -n and the network's "
        "settings, or "
        "use --backend tcp",
        rank, world_size, without_place(error.what()));
  } catch (const ::gloo::Exception& error) {
    fail<PeerLost>(
        "rank {}: Gloo could not connect the {} ranks: {}; a rank has gone, or another program "
        "came "
        "to one of their ports, which Gloo takes for a rank: start again, or with --backend tcp",
        rank, world_size, without_place(error.what()));
  }
}

}  // namespace lockstep
