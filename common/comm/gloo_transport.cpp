// Gloo's collectives on a context of its own, and how its ranks connect: liblockstep_gloo.so, which
// load_libraries.cpp loads.

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <mutex>
#include <utility>

#include "common/comm/host_transport.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using std::chrono::milliseconds;

/// Gloo may write to a connection whose other side has died. The SIGPIPE that this raises would end
/// this process without a message. The signal is held back in the calling thread, and for good in
/// the thread that Gloo starts meanwhile.
class SigpipeHeldBack {
 public:
  SigpipeHeldBack() {
    ::sigemptyset(&sigpipe_);
    ::sigaddset(&sigpipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~SigpipeHeldBack() {
    if (::sigismember(&before_, SIGPIPE) == 1) return;
    const timespec at_once{};
    ::sigtimedwait(&sigpipe_, nullptr, &at_once);  // takes away the signal that came
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeHeldBack(const SigpipeHeldBack&) = delete;
  SigpipeHeldBack& operator=(const SigpipeHeldBack&) = delete;

 private:
  sigset_t sigpipe_, before_;
};

/// Gloo's text without "[file:line] " before it.
std::string without_place(const std::string& text) {
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

// --- Calls ---------------------------------------------------------------------------------------

/// How Gloo's ring adds two parts up, in every turn: by our rule for numbers of 16 bits.
template <class T>
void add_parts(void* sum, const void* a, const void* b, size_t n) {
  add_two(static_cast<T*>(sum), static_cast<const T*>(a), static_cast<const T*>(b), int64_t(n));
}

template <class T>
T* numbers_of(const Elements& x) {
  return static_cast<T*>(x.data);
}

class GlooTransport final : public HostTransport {
 public:
  GlooTransport(std::shared_ptr<::gloo::Context> context) : context_(std::move(context)) {}

  std::string description() const override { return "gloo"; }
  /// Gloo does not tell what it sends.
  std::string counted_in() const override { return "its calls to Gloo"; }
  int64_t bytes_sent() const override { return bytes_of_calls_; }

  void run(const Call& call, uint64_t number) override {
    if (call.op != Op::barrier && call.mine.count == 0) return;
    count(call);
    with_peers([&] {
      with_type(call.mine.type, [&](auto zero) { run_typed<decltype(zero)>(call, number); });
    });
  }

  /// All transfers share a slot of their own: between two ranks they meet in their order, and ranks
  /// count transfers differently, since not all take part.
  void transfer(const std::vector<Call>& calls) override {
    constexpr uint64_t kSlot = uint64_t{1} << 40;
    std::vector<std::unique_ptr<::gloo::transport::UnboundBuffer>> buffers;
    with_peers([&] {
      for (const Call& call : calls) {
        const auto bytes = static_cast<size_t>(call.mine.count * size_of(call.mine.type));
        count(call);
        buffers.push_back(context_->createUnboundBuffer(call.mine.data, bytes));
        if (call.op == Op::send) buffers.back()->send(call.peer, kSlot);
        if (call.op == Op::receive) buffers.back()->recv(call.peer, kSlot);
      }
      for (size_t i = 0; i < calls.size(); ++i) {
        const milliseconds timeout = context_->getTimeout();
        const bool done =
            calls[i].op == Op::send ? buffers[i]->waitSend(timeout) : buffers[i]->waitRecv(timeout);
        if (!done) fail<PeerLost>("{}: broken off", calls[i].text());
      }
    });
  }

 private:
  /// Calls work(). What Gloo throws means that a rank is lost.
  template <class Work>
  static void with_peers(Work work) {
    const SigpipeHeldBack held_back;
    try {
      work();
    } catch (const ::gloo::Exception& error) {
      fail<PeerLost>("Gloo: {}", without_place(error.what()));
    }
  }

  /// Tags distinguish operations that are under way at the same time.
  static uint32_t tag_of(uint64_t number) { return static_cast<uint32_t>(number); }

  /// What Gloo is asked for instead of a reduce-scatter: see there.
  static Call call_made(Call call) {
    if (call.op == Op::reduce_scatter) call.op = Op::all_reduce, call.mine = call.all;
    return call;
  }
  void count(const Call& call) {
    bytes_of_calls_ += call_made(call).ring_bytes(context_->rank, context_->size);
  }

  template <class T>
  void run_typed(const Call& call, uint64_t number) {
    switch (call.op) {
      case Op::all_reduce:
        return all_reduce<T>(numbers_of<T>(call.mine), call, number);
      case Op::reduce_scatter:
        return reduce_scatter<T>(call, number);
      case Op::broadcast:
        return broadcast<T>(call, number);
      case Op::all_gather:
        return all_gather<T>(call, number);
      case Op::send:
      case Op::receive:
        return;  // see transfer()
      case Op::barrier: {
        ::gloo::BarrierOptions options(context_);
        options.setTag(tag_of(number));
        return ::gloo::barrier(options);
      }
    }
  }

  template <class T>
  void all_reduce(T* x, const Call& call, uint64_t number) {
    const int64_t count = call.op == Op::reduce_scatter ? call.all.count : call.mine.count;
    ::gloo::AllreduceOptions options(context_);
    options.setAlgorithm(::gloo::AllreduceOptions::Algorithm::RING);
    options.template setOutput<T>(x, static_cast<size_t>(count));
    options.setReduceFunction(&add_parts<T>);
    options.setTag(tag_of(number));
    ::gloo::allreduce(options);
    if (call.reduction == Reduction::sum) return;
    const Added<T> factor = factor_of<T>(call.reduction, context_->size);
    for (int64_t i = 0; i < count; ++i) x[i] = T(x[i] * factor);  // 16 bits: rounded once more
  }

  /// Gloo has no reduce-scatter for any number of ranks: all of a copy is summed, and a part is
  /// kept.
  template <class T>
  void reduce_scatter(const Call& call, uint64_t number) {
    std::vector<T> all(numbers_of<T>(call.all), numbers_of<T>(call.all) + call.all.count);
    all_reduce<T>(all.data(), call, number);
    std::copy_n(all.begin() + context_->rank * call.mine.count, call.mine.count,
                numbers_of<T>(call.mine));
  }

  template <class T>
  void broadcast(const Call& call, uint64_t number) {
    ::gloo::BroadcastOptions options(context_);
    options.template setOutput<T>(numbers_of<T>(call.mine), static_cast<size_t>(call.mine.count));
    options.setRoot(call.peer);
    options.setTag(tag_of(number));
    ::gloo::broadcast(options);
  }

  /// If `mine` is already at its place in `all`, Gloo is not given it.
  template <class T>
  static bool in_place(const Call& call, int rank) {
    return numbers_of<T>(call.mine) == numbers_of<T>(call.all) + rank * call.mine.count;
  }

  template <class T>
  void all_gather(const Call& call, uint64_t number) {
    ::gloo::AllgatherOptions options(context_);
    if (!in_place<T>(call, context_->rank)) {
      options.template setInput<T>(numbers_of<T>(call.mine), static_cast<size_t>(call.mine.count));
    }
    options.template setOutput<T>(numbers_of<T>(call.all), static_cast<size_t>(call.all.count));
    options.setTag(tag_of(number));
    ::gloo::allgather(options);
  }

  std::shared_ptr<::gloo::Context> context_;
  int64_t bytes_of_calls_ = 0;
};

// --- Connecting ----------------------------------------------------------------------------------

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
    connected = std::make_shared<GlooTransport>(context);
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
