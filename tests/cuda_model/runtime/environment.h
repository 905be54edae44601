#pragma once
// What the environment says about the modelled machine. Variables are read at each call, so that
// one test process can change them.
//
//   CUDA_MODEL_DEVICES=2          GPUs in the machine (0: none)
//   CUDA_VISIBLE_DEVICES=1,0      as with NVIDIA's driver, indices only
//   CUDA_MODEL_MEMORY_MIB=4096    memory of each
//   CUDA_MODEL_CAPABILITY=9.0     compute capability; below 7.0 the program has no code for it
//   CUDA_MODEL_DRIVER=13000       newest CUDA version that the driver runs; 0: no driver
//   CUDA_MODEL_PEER_ACCESS=1      0: no GPU reaches another's memory, as with most consumer GPUs
//   CUDA_MODEL_SEED=1             of the order in which a kernel's blocks run, and the warps of
//                                 each (0: ascending), and of cuDNN's proposals
//   CUDA_MODEL_PROPOSALS=1        0: cuDNN proposes nothing in float32; -1: and it runs nothing
//                                 that has the channels last
//   CUDA_MODEL_THREADS=1          that run the blocks of one kernel; for ThreadSanitizer, which
//                                 finds races between blocks of two
//   CUDA_MODEL_SIDE_BY_SIDE=2048  threads that a multiprocessor holds, of any kernel: few registers
//                                 leave room for fewer
//   CUDA_MODEL_NCCL_ROOM=0        of NCCL's kernels on a GPU at the same time; 0: any number
//   CUDA_MODEL_COPY_DELAY_US=0    each host-to-device copy sleeps so long before it reads
//   CUDA_MODEL_FAULT=function:code[:nth[:async]]
//       the nth call (from 1; 0: every one) of that function returns the code; with async the call
//       succeeds and the code turns up when the stream gets there. Function "kernel": launches. An
//       NCCL call's code becomes that of its communicator then; 7 (ncclInProgress) in
//       ncclCommInitRankConfig or ncclCommFinalize is a rank that never gets through, and in
//       ncclGroupEnd one that dies within its call.
//   NCCL_COMM_BLOCKING=1          as with NVIDIA's NCCL, instead of the configuration's `blocking`

#include <vector>

namespace cuda_model {

constexpr int kRuntimeVersion = 13000;

struct Capability {
  int major = 9, minor = 0;
};

struct Fault {
  int code = 0;  // 0: none
  bool async = false;
};

/// The value of an integer variable. Ends the process with one line if it is no number.
int integer_variable(const char* name, int fallback);
Capability capability();
/// Whether the hardware lets a GPU use another's memory.
bool has_peer_access();
/// Physical index of each GPU that the process may see.
std::vector<int> visible_devices();
/// Counts a call of `function`; returns the fault that is planted in it.
Fault take_fault(const char* function);
void count_call(const char* function);

/// How often the calling thread has called a function so far, as count_call() knows; "thread": how
/// many threads NCCL has started for it. For tests, which find it by dlsym().
extern "C" long cuda_model_calls(const char* function);

}  // namespace cuda_model
