#include "common/comm/gloo_collectives.h"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/common/error.h>
#include <gloo/math.h>
#include <gloo/reduce.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "common/comm/typed_elements.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using std::chrono::milliseconds;

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
      case Op::reduce:
        return reduce<T>(call, number);
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
    options.setReduceFunction(
        static_cast<void (*)(void*, const void*, const void*, size_t)>(&::gloo::sum<T>));
    options.setTag(tag_of(number));
    ::gloo::allreduce(options);
    finish_sum(x, count, call.reduction, context_->size);
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
  void reduce(const Call& call, uint64_t number) {
    const size_t count = static_cast<size_t>(call.mine.count);
    std::vector<T> sum(count);  // the other ranks' x stays as it is
    ::gloo::ReduceOptions options(context_);
    options.template setInput<T>(numbers_of<T>(call.mine), count);
    options.template setOutput<T>(sum.data(), count);
    options.setReduceFunction(
        static_cast<void (*)(void*, const void*, const void*, size_t)>(&::gloo::sum<T>));
    options.setRoot(call.peer);
    options.setTag(tag_of(number));
    ::gloo::reduce(options);
    if (context_->rank != call.peer) return;
    finish_sum(sum.data(), call.mine.count, call.reduction, context_->size);
    std::copy(sum.begin(), sum.end(), numbers_of<T>(call.mine));
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

}  // namespace

std::shared_ptr<HostTransport> gloo_collectives(std::shared_ptr<::gloo::Context> context) {
  return std::make_shared<GlooTransport>(std::move(context));
}

}  // namespace lockstep
