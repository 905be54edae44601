// NCCL as one process with two GPUs sees it: groups, states, what hangs and what ends it.

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "expect.h"

using Floats = std::vector<float>;

extern "C" long cuda_model_calls(const char* function);

/// The state of a communicator when it is no longer in progress, or after so many milliseconds.
ncclResult_t state(ncclComm_t comm, int milliseconds = 5000) {
  ncclResult_t now = ncclInProgress;
  for (int i = 0;; ++i) {
    EXPECT(ncclCommGetAsyncError(comm, &now) == ncclSuccess);
    if (now != ncclInProgress || i >= milliseconds) return now;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// A call that does not block was taken; by chance it has been launched already.
bool begun(ncclResult_t result) { return result == ncclInProgress || result == ncclSuccess; }

bool is_done(cudaStream_t stream) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return cudaStreamQuery(stream) == cudaSuccess;
}

/// Whether the stream comes to its end, on a busy machine, too.
bool ends(cudaStream_t stream) {
  for (int i = 0; i < 250; ++i) {
    if (is_done(stream)) return true;
  }
  return false;
}

/// Two ranks on these GPUs, with a stream and three numbers each. Those that do not block are still
/// being set up.
struct World {
  ncclComm_t comm[2] = {};
  cudaStream_t stream[2] = {};
  float* x[2] = {};

  explicit World(int gpu_of_rank_1 = 1, bool blocking = false) {
    const int gpu[2] = {0, gpu_of_rank_1};
    ncclUniqueId id;
    EXPECT(ncclGetUniqueId(&id) == ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = std::getenv("NCCL_COMM_BLOCKING") ? !blocking : blocking;  // it goes first
    EXPECT(ncclGroupStart() == ncclSuccess);
    for (int rank = 0; rank < 2; ++rank) {
      OK(cudaSetDevice(gpu[rank]));
      stream[rank] = make_stream();
      x[rank] = upload<float>(Floats(3, float(rank + 1)), stream[rank]);
      EXPECT(ncclCommInitRankConfig(&comm[rank], 2, id, rank, &config) == ncclInProgress);
    }
    EXPECT(ncclGroupEnd() == (blocking ? ncclSuccess : ncclInProgress));
    if (blocking) return;
    EXPECT(begun(state(comm[0], 0)));
  }
  ncclResult_t all_reduce(int rank, ncclRedOp_t reduction = ncclSum) {
    return ncclAllReduce(x[rank], x[rank], 3, ncclFloat32, reduction, comm[rank], stream[rank]);
  }
  void holds(float value) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT(download<Floats>(x[rank], 3, stream[rank]) == Floats(3, value));
    }
  }
  void holds_own() {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT(download<Floats>(x[rank], 3, stream[rank]) == Floats(3, float(rank + 1)));
    }
  }
  void end() {
    // One thread finalizes several ranks within a group only.
    EXPECT(ncclGroupStart() == ncclSuccess);
    for (ncclComm_t rank : comm) EXPECT(begun(ncclCommFinalize(rank)));
    EXPECT(begun(ncclGroupEnd()));
    for (ncclComm_t rank : comm) EXPECT(state(rank) == ncclSuccess);
    for (ncclComm_t rank : comm) EXPECT(ncclCommDestroy(rank) == ncclSuccess);
  }
  void abort() {
    for (ncclComm_t rank : comm) EXPECT(ncclCommAbort(rank) == ncclSuccess);
  }
};

/// Sums of 16 bits: to nearest even, from the smallest to infinity.
void sixteen_bits() {
  struct Case {
    ncclDataType_t type;
    std::vector<uint16_t> mine, other, sum;
  };
  for (const Case& each : {Case{ncclBfloat16,
                                {0x3f80, 0x3f81, 0x0001, 0x7f7f, 0x8000},
                                {0x3b80, 0x3b80, 0x0001, 0x7f7f, 0x8000},
                                {0x3f80, 0x3f82, 0x0002, 0x7f80, 0x0000}},
                           Case{ncclFloat16,
                                {0x3c00, 0x3c01, 0x0001, 0x7bff, 0x03ff},
                                {0x1000, 0x1000, 0x0001, 0x4c00, 0x0001},
                                {0x3c00, 0x3c02, 0x0002, 0x7c00, 0x0400}}}) {
    World world;
    for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
    uint16_t* x[2] = {};
    ncclGroupStart();
    for (int rank = 0; rank < 2; ++rank) {
      OK(cudaSetDevice(rank));
      x[rank] = upload<uint16_t>(rank == 0 ? each.mine : each.other, world.stream[rank]);
      EXPECT(ncclAllReduce(x[rank], x[rank], each.sum.size(), each.type, ncclSum, world.comm[rank],
                           world.stream[rank]) == ncclSuccess);
    }
    EXPECT(begun(ncclGroupEnd()));
    for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT((download<std::vector<uint16_t>>(x[rank], each.sum.size(), world.stream[rank]) ==
              each.sum));
    }
    world.end();
  }
}

void groups() {
  World world;
  for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
  for (const ncclRedOp_t reduction : {ncclSum, ncclAvg}) {
    ncclGroupStart();
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT(world.all_reduce(rank, reduction) == ncclSuccess);
      EXPECT(ends(world.stream[rank]));  // nothing starts within the group
    }
    EXPECT(begun(ncclGroupEnd()));
    // A caller that does not wait for the launch gets an error.
    EXPECT(world.all_reduce(0) == ncclInvalidArgument);
    EXPECT(std::strstr(ncclGetLastError(nullptr), "before the previous operation returned"));
    for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
    world.holds(3);  // 1 + 2, then (3 + 3) / 2
  }
  EXPECT(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, world.comm[0], world.stream[0]) ==
         ncclSuccess);
  EXPECT(ncclBroadcast(world.x[0], world.x[0], 3, ncclFloat32, 2, world.comm[0], world.stream[0]) ==
         ncclInvalidArgument);
  EXPECT(ncclGroupEnd() == ncclInvalidUsage);
  world.end();
}

/// A send may meet its receive in a later group; within one, both directions go on at once.
void transfers() {
  World world;
  for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
  EXPECT(begun(ncclSend(world.x[0], 3, ncclFloat32, 1, world.comm[0], world.stream[0])));
  EXPECT(state(world.comm[0]) == ncclSuccess);
  EXPECT(!is_done(world.stream[0]));
  EXPECT(begun(ncclRecv(world.x[1], 3, ncclFloat32, 0, world.comm[1], world.stream[1])));
  EXPECT(state(world.comm[1]) == ncclSuccess);
  world.holds(1);
  world.end();
}

void forgotten_group() {
  World world;
  for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
  EXPECT(world.all_reduce(0) == ncclInProgress);
  EXPECT(state(world.comm[0], 50) == ncclInProgress);  // for ever: rank 1 cannot be called
  world.abort();
}

/// What a rank that comes later waits for has been taken back.
void abort_leaves_the_others_waiting() {
  World world;
  for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
  EXPECT(begun(ncclSend(world.x[0], 3, ncclFloat32, 1, world.comm[0], world.stream[0])));
  EXPECT(state(world.comm[0]) == ncclSuccess);
  EXPECT(!is_done(world.stream[0]));
  EXPECT(ncclCommAbort(world.comm[0]) == ncclSuccess);
  EXPECT(ends(world.stream[0]));
  EXPECT(begun(ncclRecv(world.x[1], 3, ncclFloat32, 0, world.comm[1], world.stream[1])));
  EXPECT(state(world.comm[1]) == ncclSuccess);
  EXPECT(!is_done(world.stream[1]));
  EXPECT(ncclCommAbort(world.comm[1]) == ncclSuccess);
  world.holds_own();
}

/// Rank 1's stream is busy; its GPU is not asked. Then both go on, without a result.
void abort_frees_those_who_wait() {
  World world;
  for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
  std::atomic<bool> open{false};
  OK(cudaLaunchHostFunc(
      world.stream[1],
      [](void* gate) {
        while (!*static_cast<std::atomic<bool>*>(gate)) std::this_thread::yield();
      },
      &open));
  ncclGroupStart();
  for (int rank = 0; rank < 2; ++rank) EXPECT(world.all_reduce(rank) == ncclSuccess);
  EXPECT(begun(ncclGroupEnd()));
  for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
  EXPECT(!is_done(world.stream[0]));
  EXPECT(ncclCommAbort(world.comm[0]) == ncclSuccess);
  EXPECT(ends(world.stream[0]));
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    open = true;
  });
  EXPECT(ncclCommAbort(world.comm[1]) == ncclSuccess);  // waits for the GPU
  EXPECT(open);
  opens.join();
  EXPECT(download<Floats>(world.x[0], 3, world.stream[0]) == Floats(3, 1));
}

void one_gpu_twice() {
  World world(0);
  EXPECT(state(world.comm[0]) == ncclInvalidUsage);
  EXPECT(
      std::strstr(ncclGetLastError(world.comm[0]), "Duplicate GPU detected : rank 0 and rank 1"));
  world.abort();
}

/// A call on communicators that block comes back when it is launched, and starts no thread.
void blocking() {
  const long threads = cuda_model_calls("thread"), groups = cuda_model_calls("ncclGroupEnd");
  World world(1, true);
  ncclGroupStart();
  for (int rank = 0; rank < 2; ++rank) EXPECT(world.all_reduce(rank) == ncclSuccess);
  EXPECT(ncclGroupEnd() == ncclSuccess);
  EXPECT(cuda_model_calls("thread") == threads);
  EXPECT(cuda_model_calls("ncclGroupEnd") == groups + 1);
  world.holds(3);
  world.end();
}

void not_blocking() {
  const long threads = cuda_model_calls("thread");
  groups();
  EXPECT(cuda_model_calls("thread") == threads + 3);  // the set-up and two groups
}

/// NCCL finds in a call that another rank has gone.
void death_in_a_call() {
  World world;
  for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
  setenv("CUDA_MODEL_FAULT", "ncclGroupEnd:6", 1);
  EXPECT(world.all_reduce(0) == ncclRemoteError);
  unsetenv("CUDA_MODEL_FAULT");
  EXPECT(state(world.comm[0]) == ncclRemoteError);
  world.abort();
}

/// Each of these ends the process.
void misuse(const std::string& what) {
  World world(1, what == "two threads");
  if (what == "two threads") {
    std::thread caller([&] { world.all_reduce(0); });  // waits for rank 1
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ncclCommAbort(world.comm[0]);
    caller.join();
  }
  world.abort();
  if (what == "abort twice") ncclCommAbort(world.comm[0]);
  if (what == "call after abort") world.all_reduce(0);
  if (what == "ask after abort") state(world.comm[0]);
}

int main(int count, char** arguments) {
  if (count > 2 && std::strcmp(arguments[1], "misuse") == 0) {
    misuse(arguments[2]);
    return 0;
  }
  if (count > 1 && std::strcmp(arguments[1], "disagree") == 0) {  // NCCL would hang, or worse
    World world;
    for (ncclComm_t rank : world.comm) EXPECT(state(rank) == ncclSuccess);
    ncclGroupStart();
    for (int rank = 0; rank < 2; ++rank) {
      ncclAllReduce(world.x[rank], world.x[rank], 3 - rank, ncclFloat32, ncclSum, world.comm[rank],
                    world.stream[rank]);
    }
    ncclGroupEnd();
    OK(cudaStreamSynchronize(world.stream[0]));
    std::this_thread::sleep_for(std::chrono::seconds(5));
    return 0;
  }
  sixteen_bits();
  groups();
  transfers();
  forgotten_group();
  abort_leaves_the_others_waiting();
  abort_frees_those_who_wait();
  one_gpu_twice();
  death_in_a_call();
  blocking();
  setenv("NCCL_COMM_BLOCKING", "1", 1);
  blocking();
  setenv("NCCL_COMM_BLOCKING", "0", 1);
  not_blocking();
  return expect_failures == 0 ? 0 : 1;
}
