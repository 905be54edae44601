// Collectives between GPUs by NCCL, and how they end when a rank fails.
//
// A collective waits on the GPU for its peers, for ever if one of them does not come. So the rank
// keeps a list of its calls that have not ended. While its host waits for a stream of the device,
// it asks NCCL for errors and looks how long the oldest call has waited; where that is too long, or
// a rank has failed, it aborts NCCL's communicator, and the device reports why.

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "common/comm/nccl_communicator.h"
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

constexpr double kGraceSeconds = 5;  // for ending and aborting, which hang where a GPU hangs

/// Polls until `ready()` holds; false if it does not within that many seconds.
template <class Ready>
bool poll(double seconds, Ready ready) {
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration<double>(seconds);
  while (!ready()) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    // Most waits take microseconds; longer ones are not worth a busy core.
    if (now - begin < std::chrono::milliseconds(1)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return true;
}

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

/// A call given to NCCL, or transfers that run at the same time, all on one stream.
struct Pending {
  std::string what;  // "rank 0: collective 3 (all_reduce of 5 f32, sum)"
  Stream stream;
  Event arrived, finished;  // NCCL waits for the peers between these two
  FlightCall flight{};      // and, where it is recorded, its begin and end on the stream
  std::optional<TimedEvent> begin{}, end{};
  std::optional<Clock::time_point> came{};  // when the host saw it begin, as the oldest

  bool has_finished() const { return finished.done() && !stream.backend().error(); }
  /// Tells the flight recorder what the device has come to. Whether the call has finished: asked
  /// once, for what ends between two questions would be forgotten before it is recorded.
  bool note() {
    const bool ended = has_finished();
    if (!end) return ended;
    if (!flight.has_started() && arrived.done()) flight.start();
    if (ended) flight.complete(int64_t(1e9 * end->seconds_since(*begin)));
    return ended;
  }
};

/// NCCL's communicator does not block: no call of its waits for another rank for ever. Where a call
/// returns ncclInProgress, NCCL continues in the background, and the communicator must be left
/// alone until it is ready.
///
/// This costs a thread of NCCL's for each group, and blocking would not. But there the set-up, and
/// every first use of an algorithm or a peer, waits for the other ranks inside the call. Nothing
/// may end that: ncclCommAbort from another thread frees the communicator under the call (for a
/// non-blocking one it first joins NCCL's thread), and NCCL's user guide allows one thread at a
/// time.
///
/// A collective is one NCCL group; transfers that follow each other on a stream are another. Larger
/// groups would have to be the same on all ranks, which no rank alone can know.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Device& device, int rank, int world_size, const std::string& id,
                   double timeout_seconds);
  /// Lets the calls in flight end; where they do not, aborts them.
  ~NcclCommunicator() override;

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall flight) override;
  Pending begin(Stream stream, const std::vector<Call>& calls, const FlightCall& flight);
  void give(const Pending& pending, const std::vector<Call>& calls);
  std::exception_ptr end_group(bool open, Answer answer, const std::string& what) const;

  ncclResult_t state() const;
  void await_ready(const char* call) const;
  std::string name() const { return fmt::format("{} ({})", who(), device_.name()); }
  std::string others() const;

  void watch(cuda::DeviceState& device);
  void look();
  void forget_finished();
  std::string failure(const Pending& oldest) const;
  std::string failure_of(const Pending& pending) const;
  std::string silence();

  void give_up(const std::string& why);
  bool finalize() const;
  void abort();
  void await_abort() const;

  Device& device_;
  double timeout_seconds_;
  std::thread::id host_ = std::this_thread::get_id();  // the one thread that calls
  ncclComm_t comm_ = nullptr;                          // null after abort()
  std::future<void> aborted_;                          // then: NCCL has returned
  std::string broken_;                                 // why no further call can be made
  std::vector<Pending> pending_;                       // what NCCL has, in order
  cuda::DeviceState* watched_ = nullptr;
};

// --- Birth ---------------------------------------------------------------------------------------

NcclCommunicator::NcclCommunicator(Device& device, int rank, int world_size, const std::string& id,
                                   double timeout_seconds)
    : Communicator(rank, world_size, std::make_shared<SentBytes>("its calls to NCCL")),
      device_(device),
      timeout_seconds_(timeout_seconds) {
  const ncclUniqueId group = id_of(id);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    cuda::check(cudaSetDevice(device.id().index), "cudaSetDevice", device.name());
    check_nccl(ncclCommInitRankConfig(&comm_, world_size, group, rank, &config),
               "ncclCommInitRankConfig", name(), comm_);
    await_ready("ncclCommInitRankConfig");
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

/// The other ranks: "rank 1", "one of the other 3 ranks"; empty if there are none.
std::string NcclCommunicator::others() const {
  if (world_size() == 1) return "";
  if (world_size() > 2) return fmt::format("one of the other {} ranks", world_size() - 1);
  return name_of_rank(1 - rank());
}

void NcclCommunicator::await_ready(const char* call) const {
  const bool ready = poll(timeout_seconds_, [&] {
    const ncclResult_t now = state();
    check_nccl(now, call, name(), comm_);
    return now != ncclInProgress;
  });
  if (ready) return;
  const std::string missing = others();
  fail<PeerLost>(
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
  forget_finished();
  try {
    Pending pending = begin(stream, calls, flight);
    give(pending, calls);
    if (pending.begin) pending.end = stream.record_time();
    pending.finished = stream.record();
    if (!broken_.empty()) throw PeerLost(broken_);  // found while the host waited for an event
    pending_.push_back(std::move(pending));
  } catch (const BadInput&) {
    flight.give_up();
    throw;  // for example, the stream is being captured: nothing has reached NCCL
  } catch (const Error& error) {
    flight.give_up();
    if (broken_.empty()) give_up(error.what());
    throw PeerLost(broken_);
  }
  for (const Call& call : calls) {
    sent()->add(call.purpose, call.ring_bytes(rank(), world_size()));
  }
}

/// The calls, before they are given to NCCL. Until NCCL has them they are in no list: what looks
/// for calls that have ended, or have failed, while the host waits would take them for such. Throws
/// PeerLost where no more can be given to NCCL.
Pending NcclCommunicator::begin(Stream stream, const std::vector<Call>& calls,
                                const FlightCall& flight) {
  const std::string text = calls[0].text() + (calls.size() > 1 ? ", ..." : "");
  const std::string what =
      calls[0].is_transfer() ? text : fmt::format("collective {} ({})", flight.number(), text);
  watch(cuda_stream(stream).device_state());
  if (!pending_.empty() && !(pending_.back().stream == stream)) {
    stream.wait(pending_.back().finished);  // as all ranks have them in one order
  }
  const Event arrived = stream.record();
  Pending pending{.what = fmt::format("{}: {}", who(), what),
                  .stream = stream,
                  .arrived = arrived,
                  .finished = arrived,
                  .flight = flight};
  if (pending.flight.is_recorded()) pending.begin = stream.record_time();
  std::string failed = failure(pending_.empty() ? pending : pending_.front());
  if (failed.empty()) failed = failure_of(pending);  // a stream that takes no more work
  if (!failed.empty()) throw PeerLost(failed);
  return pending;
}

/// Returns when NCCL has enqueued the calls on the stream, as one operation. Throws PeerLost if it
/// does not.
void NcclCommunicator::give(const Pending& pending, const std::vector<Call>& calls) {
  const char* op = calls.size() == 1 ? name_of(calls[0].op) : "transfers";
  bool taken = false;
  std::exception_ptr refused;  // the stream must end its operation before it is thrown
  cuda_stream(pending.stream).enqueue(op, [&](cudaStream_t raw) {
    taken = true;
    Answer answer{ncclGroupStart(), "ncclGroupStart"};
    const bool open = is_well(answer.status);
    for (const Call& call : calls) {
      if (is_well(answer.status)) answer = call_nccl(call, world_size(), comm_, raw);
    }
    refused = end_group(open, answer, pending.what);
  });
  if (refused) std::rethrow_exception(refused);
  if (!taken) throw PeerLost(broken_.empty() ? failure_of(pending) : broken_);
}

/// Ends the group, and waits until NCCL has enqueued it; the PeerLost of one for which that failed
/// or took too long. `answer` is the last one so far.
std::exception_ptr NcclCommunicator::end_group(bool open, Answer answer,
                                               const std::string& what) const {
  const ncclResult_t ended = open ? ncclGroupEnd() : ncclSuccess;
  try {
    check_nccl(answer.status, answer.function, name(), comm_);
    check_nccl(ended, "ncclGroupEnd", name(), comm_);
    await_ready("ncclGroupEnd");
    return nullptr;
  } catch (const PeerLost& error) {
    return std::make_exception_ptr(PeerLost(fmt::format("{}: {}", what, error.what())));
  }
}

// --- Waiting -------------------------------------------------------------------------------------

/// A host that is blocked on a stream of the device, for example for a loss, must not wait for ever
/// because the stream waits for another rank that has failed or is gone.
void NcclCommunicator::watch(cuda::DeviceState& device) {
  if (watched_ != nullptr) return;
  watched_ = &device;
  device.watch(this, [this] { look(); });
}

void NcclCommunicator::look() {
  if (std::this_thread::get_id() != host_) return;
  forget_finished();
  if (pending_.empty()) return;
  std::string failed = failure(pending_.front());
  if (failed.empty()) failed = silence();
  if (!failed.empty()) give_up(failed);
}

void NcclCommunicator::forget_finished() {
  const auto runs = [](Pending& pending) { return !pending.note(); };
  pending_.erase(pending_.begin(), std::find_if(pending_.begin(), pending_.end(), runs));
}

/// What has gone wrong, with the oldest call or with NCCL in the background; empty if nothing. What
/// keeps a later call waiting is seen when that one is the oldest: to ask for all of them at every
/// launch would take the host longer the further it is ahead of the GPU.
std::string NcclCommunicator::failure(const Pending& oldest) const {
  const std::string failed = failure_of(oldest);
  if (!failed.empty()) return failed;
  try {
    check_nccl(state(), "ncclCommGetAsyncError", name(), comm_);
  } catch (const PeerLost& error) {
    return fmt::format("{}: {}", oldest.what, error.what());
  }
  return "";
}

/// What has gone wrong on a call's stream.
std::string NcclCommunicator::failure_of(const Pending& pending) const {
  pending.finished.done();  // asks the GPU, so that the stream learns of an error there
  const std::exception_ptr error = pending.stream.backend().error();
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& cause) {
    return fmt::format("{}: {} failed: {}", pending.what, name(), cause.what());
  }
}

/// Who has kept this rank waiting for too long; empty if nobody has. The time begins when the
/// rank's own stream has come to the oldest call.
std::string NcclCommunicator::silence() {
  Pending& first = pending_.front();
  if (!first.arrived.done()) return "";
  if (!first.came) first.came = Clock::now();
  const std::chrono::duration<double> waited = Clock::now() - *first.came;
  if (waited.count() < timeout_seconds_) return "";
  return fmt::format("{}: no answer from {} within {} s", first.what, others(), timeout_seconds_);
}

// --- Death ---------------------------------------------------------------------------------------

/// Ends what is in flight. The results must not be used: the device reports why.
void NcclCommunicator::give_up(const std::string& why) {
  broken_ = why;
  abort();
  if (watched_ != nullptr) watched_->fail(std::make_exception_ptr(PeerLost(why)));
  for (Pending& pending : pending_) pending.flight.give_up();
  pending_.clear();
}

NcclCommunicator::~NcclCommunicator() {
  if (watched_ != nullptr) watched_->watch(this, nullptr);
  if (comm_ != nullptr && finalize()) {
    ncclCommDestroy(comm_);
  } else {
    if (comm_ != nullptr) abort();
    await_abort();
  }
}

/// Waits for the calls in flight. True when the communicator may be destroyed.
bool NcclCommunicator::finalize() const {
  const ncclResult_t status = ncclCommFinalize(comm_);
  if (status != ncclSuccess && status != ncclInProgress) return false;
  return poll(std::min(kGraceSeconds, timeout_seconds_), [&] { return state() == ncclSuccess; });
}

/// Does not wait. ncclCommAbort frees memory, and so waits for all that runs on the GPU: also for a
/// call of another group, which ends only when that is aborted, too.
void NcclCommunicator::abort() {
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
