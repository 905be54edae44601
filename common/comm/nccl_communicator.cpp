// Collectives between GPUs by NCCL, and how they end when a rank fails.
//
// A collective waits for its peers, on the host or on the GPU, for ever if one of them does not
// come. A thread beside the host's watches for that (nccl_watcher.h).

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "common/comm/nccl_communicator.h"
#include "common/comm/nccl_watcher.h"
#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/core/tensor.h"
#include "common/kernels/cuda/check.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep {
namespace {

using Op = Call::Op;
using Clock = std::chrono::steady_clock;
using cuda::cuda_stream;

constexpr double kGraceSeconds = 5;  // for aborting, which hangs where a GPU hangs

/// NCCL's texts may have several lines; ours have one.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

/// It succeeded, or continues in the background.
bool is_well(ncclResult_t status) { return status == ncclSuccess || status == ncclInProgress; }

/// Throws PeerLost, "rank 1 (cuda:1): ncclAllReduce: ..." with NCCL's own words, unless the call
/// succeeded or continues in the background. `who` is what the text begins with.
void check_nccl(ncclResult_t status, const char* call, const std::string& who,
                ncclComm_t comm = nullptr) {
  if (is_well(status)) return;
  const std::string words = one_line(ncclGetLastError(comm));
  fail<PeerLost>("{}: {}: {}{}{}", who, call, ncclGetErrorString(status), words.empty() ? "" : ": ",
                 words);
}

ncclDataType_t nccl_type(ElementType type) {
  switch (type) {
    case ElementType::f32:
      return ncclFloat32;
    case ElementType::f64:
      return ncclFloat64;
    case ElementType::i64:
      return ncclInt64;
    case ElementType::bf16:
      return ncclBfloat16;
    case ElementType::fp16:
      return ncclFloat16;
  }
  return ncclNumTypes;
}

struct Answer {
  ncclResult_t status;
  const char* function;
};

/// Gives a call to NCCL. A barrier is an all-reduce of its `mine`, whose value nobody needs.
/// One rank's average is its sum. NCCL has a kernel of its own for it, which leaves elements out
/// for some counts (2.28.9: the last one of 100,001); a sum it copies.
Answer call_nccl(const Call& call, int world_size, ncclComm_t comm, cudaStream_t stream) {
  void* const mine = call.mine.data;
  void* const all = call.all.data;
  const size_t count = static_cast<size_t>(call.mine.count);
  const ncclDataType_t type = nccl_type(call.mine.type);
  const bool average = call.reduction == Reduction::average && world_size > 1;
  const ncclRedOp_t reduction = average ? ncclAvg : ncclSum;
  switch (call.op) {
    case Op::all_reduce:
    case Op::barrier:
      return {ncclAllReduce(mine, mine, count, type, reduction, comm, stream), "ncclAllReduce"};
    case Op::broadcast:
      return {ncclBroadcast(mine, mine, count, type, call.peer, comm, stream), "ncclBroadcast"};
    case Op::all_gather:
      return {ncclAllGather(mine, all, count, type, comm, stream), "ncclAllGather"};
    case Op::reduce_scatter:
      return {ncclReduceScatter(all, mine, count, type, reduction, comm, stream),
              "ncclReduceScatter"};
    case Op::send:
      return {ncclSend(mine, count, type, call.peer, comm, stream), "ncclSend"};
    case Op::receive:
      return {ncclRecv(mine, count, type, call.peer, comm, stream), "ncclRecv"};
  }
  return {ncclInvalidArgument, "NCCL"};
}

ncclUniqueId id_of(const std::string& text) {
  ncclUniqueId id;
  require(text.size() == sizeof id.internal,
          "NCCL: the id of a group has {} bytes, found {}: all ranks take what nccl_unique_id() "
          "gave to rank 0",
          sizeof id.internal, text.size());
  std::memcpy(id.internal, text.data(), sizeof id.internal);
  return id;
}

/// NCCL's communicator blocks: a call comes back when NCCL has enqueued it. One that does not block
/// would start a thread for each group of calls, and the host would have to ask again and again
/// whether the thread is ready. NCCL_COMM_BLOCKING=0, a variable of NCCL's own, chooses that all
/// the same, to compare the two (`tools/gpu-check --part bench`).
///
/// The set-up, and every first use of an algorithm or a peer, waits for the other ranks inside the
/// call. Nothing may end that: ncclCommAbort from another thread frees the communicator under the
/// call, and NCCL's user guide allows one thread at a time. So at the deadline the watcher names
/// who did not come, and ends the process. It does the same for a call that waits on the GPU: the
/// host may be in a call of NCCL's, or anywhere else that waits for the GPU. The host itself aborts
/// only a communicator of which a call has failed, for then it is in none.
///
/// A collective is one NCCL group; transfers that follow each other on a stream are another. Larger
/// groups would have to be the same on all ranks, which no rank alone can know.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Device& device, int rank, int world_size, const std::string& id,
                   double timeout_seconds);
  /// Waits for the calls in flight; where an error has come between, aborts them.
  ~NcclCommunicator() override;

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall flight) override;
  NcclCall begin(Stream stream, const std::vector<Call>& calls, const FlightCall& flight);
  void give(NcclCall& given, const std::vector<Call>& calls);
  std::exception_ptr end_group(bool open, Answer answer, const std::string& what) const;

  ncclResult_t state() const;
  ncclResult_t settled(ncclResult_t status) const;
  std::string name() const { return fmt::format("{} ({})", who(), device_.name()); }
  std::string others() const;
  std::string whom(const std::vector<Call>& calls) const;
  std::string late_in(const char* call, const std::string& missing) const;
  std::string failure_of(const NcclCall& call) const;

  void give_up(Stream stream, const std::string& why);
  bool finalize();
  void abort();
  void await_abort() const;

  struct Last {
    Stream stream;
    Event finished;
  };
  Device& device_;
  const double timeout_seconds_;
  const int exceptions_ = std::uncaught_exceptions();
  ncclComm_t comm_ = nullptr;   // null after abort()
  std::future<void> aborted_;   // then: NCCL has returned
  std::string broken_;          // why no further call can be made
  std::optional<Last> last_{};  // call given to NCCL
  std::optional<NcclWatcher> watcher_;
};

// --- Birth ---------------------------------------------------------------------------------------

NcclCommunicator::NcclCommunicator(Device& device, int rank, int world_size, const std::string& id,
                                   double timeout_seconds)
    : Communicator(rank, world_size, std::make_shared<SentBytes>("its calls to NCCL")),
      device_(device),
      timeout_seconds_(timeout_seconds) {
  const ncclUniqueId group = id_of(id);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  cuda::check(cudaSetDevice(device.id().index), "cudaSetDevice", device.name());
  watcher_.emplace(device.id().index, timeout_seconds,
                   [this] { check_nccl(state(), "ncclCommGetAsyncError", name(), comm_); });
  const char* const call = "ncclCommInitRankConfig";
  try {
    const NcclWatcher::Inside inside(*watcher_, [&] { return late_in(call, others()); });
    check_nccl(settled(ncclCommInitRankConfig(&comm_, world_size, group, rank, &config)), call,
               name(), comm_);
  } catch (...) {
    abort();
    await_abort();
    throw;
  }
}

ncclResult_t NcclCommunicator::state() const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t status = ncclCommGetAsyncError(comm_, &state);
  return status == ncclSuccess ? state : status;
}

/// Waits for what continues in the background, where NCCL_COMM_BLOCKING=0 chose that.
ncclResult_t NcclCommunicator::settled(ncclResult_t status) const {
  const auto begin = Clock::now();
  for (; status == ncclInProgress; status = state()) {
    // Most waits take microseconds; longer ones are not worth a busy core.
    if (Clock::now() - begin < std::chrono::milliseconds(1)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return status;
}

/// The other ranks: "rank 1", "one of the other 3 ranks"; empty if there are none.
std::string NcclCommunicator::others() const {
  if (world_size() == 1) return "";
  if (world_size() > 2) return fmt::format("one of the other {} ranks", world_size() - 1);
  return name_of_rank(1 - rank());
}

/// For whom these calls wait.
std::string NcclCommunicator::whom(const std::vector<Call>& calls) const {
  const bool of_one = std::ranges::all_of(
      calls, [&](const Call& call) { return call.is_transfer() && call.peer == calls[0].peer; });
  return of_one ? name_of_rank(calls[0].peer) : others();
}

/// What the watcher says of a call of NCCL's that does not come back. `missing`: "rank 1", or
/// empty.
std::string NcclCommunicator::late_in(const char* call, const std::string& missing) const {
  return fmt::format(
      "{}: {} not ready within {} s: {}the ranks do not reach each other; NCCL_DEBUG=INFO shows "
      "where they stop",
      call, name(), timeout_seconds_, missing.empty() ? "" : missing + " did not come, or ");
}

// --- Calls ---------------------------------------------------------------------------------------

void NcclCommunicator::enqueue(Stream stream, const std::vector<Call>& together,
                               FlightCall flight) {
  if (!broken_.empty()) throw PeerLost(broken_);
  require(&stream.device() == &device_, "{}: {} on a stream of {}, the rank is on {}", who(),
          together[0].text(), stream.device().name(), device_.name());
  std::optional<Buffer> nobody_needs;
  std::vector<Call> calls;
  for (Call call : together) {
    if (call.op == Op::barrier) {
      call.mine = {nobody_needs.emplace(stream, sizeof(float)).data(), 1, ElementType::f32};
    }
    if (call.mine.count > 0) calls.push_back(std::move(call));
  }
  if (calls.empty()) return flight.complete(0);
  try {
    NcclCall given = begin(stream, calls, flight);
    give(given, calls);
    given.record_end();
    last_ = {stream, *given.finished};
    watcher_->add(std::move(given));
  } catch (const BadInput&) {
    flight.give_up();
    throw;  // for example, the stream is being captured: nothing has reached NCCL
  } catch (const Error& error) {
    flight.give_up();
    give_up(stream, error.what());
    throw PeerLost(broken_);
  }
  for (const Call& call : calls) {
    sent()->add(call.purpose, call.ring_bytes(rank(), world_size()));
  }
}

/// The calls, before they are given to NCCL. Throws PeerLost where no more can be given to it.
NcclCall NcclCommunicator::begin(Stream stream, const std::vector<Call>& calls,
                                 const FlightCall& flight) {
  const std::string text = calls[0].text() + (calls.size() > 1 ? ", ..." : "");
  const std::string what =
      calls[0].is_transfer() ? text : fmt::format("collective {} ({})", flight.number(), text);
  // As all ranks have them in one order.
  if (last_ && !(last_->stream == stream)) stream.wait(last_->finished);
  NcclCall call{.what = fmt::format("{}: {}", who(), what),
                .whom = whom(calls),
                .stream = stream,
                .flight = flight};
  call.record_begin();
  if (stream.backend().error()) throw PeerLost(failure_of(call));
  return call;
}

/// Returns when NCCL has enqueued the calls on the stream, as one operation. Throws PeerLost if it
/// does not.
void NcclCommunicator::give(NcclCall& given, const std::vector<Call>& calls) {
  const char* op = calls.size() == 1 ? name_of(calls[0].op) : "transfers";
  bool taken = false;
  std::exception_ptr refused;  // the stream must end its operation before it is thrown
  cuda_stream(given.stream).enqueue(op, [&](cudaStream_t raw) {
    taken = true;
    const NcclWatcher::Inside inside(*watcher_, [&] {
      given.flight.give_up();
      return fmt::format("{}: {}", given.what, late_in("ncclGroupEnd", given.whom));
    });
    Answer answer{ncclGroupStart(), "ncclGroupStart"};
    const bool open = is_well(answer.status);
    for (const Call& call : calls) {
      if (is_well(answer.status)) answer = call_nccl(call, world_size(), comm_, raw);
    }
    refused = end_group(open, answer, given.what);
  });
  if (refused) std::rethrow_exception(refused);
  if (!taken) throw PeerLost(failure_of(given));
}

/// Ends the group; the PeerLost of one that NCCL did not enqueue. `answer` is the last one so far.
std::exception_ptr NcclCommunicator::end_group(bool open, Answer answer,
                                               const std::string& what) const {
  const ncclResult_t ended = open ? settled(ncclGroupEnd()) : ncclSuccess;
  try {
    check_nccl(answer.status, answer.function, name(), comm_);
    check_nccl(ended, "ncclGroupEnd", name(), comm_);
    return nullptr;
  } catch (const PeerLost& error) {
    return std::make_exception_ptr(PeerLost(fmt::format("{}: {}", what, error.what())));
  }
}

/// What has gone wrong on the stream of a call; empty if nothing has.
std::string NcclCommunicator::failure_of(const NcclCall& call) const {
  const std::exception_ptr error = call.stream.backend().error();
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& cause) {
    return fmt::format("{}: {} failed: {}", call.what, name(), cause.what());
  }
}

// --- Death ---------------------------------------------------------------------------------------

/// Ends what is in flight. The results must not be used: the device reports why.
void NcclCommunicator::give_up(Stream stream, const std::string& why) {
  broken_ = why;
  watcher_->give_up();
  abort();
  cuda_stream(stream).device_state().fail(std::make_exception_ptr(PeerLost(why)));
}

NcclCommunicator::~NcclCommunicator() {
  const bool in_order = std::uncaught_exceptions() == exceptions_;
  if (comm_ != nullptr && !(in_order && finalize())) abort();
  if (comm_ == nullptr) await_abort();
}

/// Waits for the calls in flight, and gives the communicator back. False if one of them failed, or
/// if NCCL refuses to.
bool NcclCommunicator::finalize() {
  try {
    // Here each call in flight has a deadline of its own. Inside NCCL one would be for all of them.
    if (last_) last_->finished.synchronize();
  } catch (const std::exception&) {
    return false;  // the stream tells it to all who ask
  }
  {
    const NcclWatcher::Inside inside(*watcher_,
                                     [&] { return late_in("ncclCommFinalize", others()); });
    if (settled(ncclCommFinalize(comm_)) != ncclSuccess) return false;
  }
  watcher_.reset();  // it would ask NCCL about a call whose end the GPU has not told yet
  ncclCommDestroy(comm_);
  return true;
}

/// In no call of NCCL's. Does not wait. ncclCommAbort frees memory, and so waits for all that runs
/// on the GPU: also for a call of another group, which ends only when that is aborted, too.
void NcclCommunicator::abort() {
  watcher_.reset();
  std::promise<void> aborted;
  aborted_ = aborted.get_future();
  std::thread([comm = std::exchange(comm_, nullptr), aborted = std::move(aborted)]() mutable {
    ncclCommAbort(comm);  // nothing for a null pointer
    aborted.set_value();
  }).detach();
}

/// Where a GPU is stuck, NCCL is left alone: a process that reports a lost peer ends soon.
void NcclCommunicator::await_abort() const {
  aborted_.wait_for(std::chrono::duration<double>(kGraceSeconds));
}

// --- The border of the library -------------------------------------------------------------------

std::string unique_id() {
  ncclUniqueId id;
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", "NCCL");
  return std::string(id.internal, sizeof id.internal);
}

std::unique_ptr<Communicator> make_rank(Device& device, int rank, int world_size,
                                        const std::string& id, double timeout_seconds) {
  return std::make_unique<NcclCommunicator>(device, rank, world_size, id, timeout_seconds);
}

}  // namespace

extern "C" void lockstep_nccl_backend(NcclBackend& backend) { backend = {unique_id, make_rank}; }

}  // namespace lockstep
