// Streams, events, copies, memory, capture.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "expect.h"

using Ints = std::vector<int>;

__global__ void add(int* x, int value) { *x += value; }
__global__ void copy(const int* from, int* to) { *to = *from; }

void sleep_20_ms(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
void call_the_api(void* code) { *static_cast<cudaError_t*>(code) = cudaDeviceSynchronize(); }

cudaEvent_t make_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  OK(cudaEventCreateWithFlags(&event, flags));
  return event;
}

void events() {
  cudaStream_t producer = make_stream(), consumer = make_stream();
  int* x = upload<int>(Ints{1}, producer);
  int* y = upload<int>(Ints{0}, consumer);
  cudaEvent_t ready = make_event(cudaEventDefault), begin = make_event(cudaEventDefault);
  OK(cudaEventQuery(ready));  // never recorded
  float ms = 0;
  EXPECT_CODE(cudaEventElapsedTime(&ms, begin, ready), cudaErrorInvalidResourceHandle);
  OK(cudaEventRecord(begin, producer));
  OK(cudaLaunchHostFunc(producer, sleep_20_ms, nullptr));
  add<<<1, 1, 0, producer>>>(x, 41);
  OK(cudaEventRecord(ready, producer));
  EXPECT_CODE(cudaEventQuery(ready), cudaErrorNotReady);
  EXPECT_CODE(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_CODE(cudaStreamQuery(producer), cudaErrorNotReady);
  (void)cudaGetLastError();
  OK(cudaStreamWaitEvent(consumer, ready));
  copy<<<1, 1, 0, consumer>>>(x, y);
  EXPECT(download<Ints>(y, 1, consumer)[0] == 42);
  OK(cudaEventElapsedTime(&ms, begin, ready));
  EXPECT(ms >= 20 && ms < 2000);
  cudaError_t inside = cudaSuccess;
  OK(cudaLaunchHostFunc(consumer, call_the_api, &inside));
  OK(cudaStreamSynchronize(consumer));
  EXPECT_CODE(inside, cudaErrorNotPermitted);
  (void)cudaGetLastError();
}

/// CUDA promises no more than one host function at a time, whatever their streams.
void host_functions() {
  static std::atomic<int> running{0}, most{0};
  const auto stay = [](void*) {
    most = std::max(most.load(), ++running);
    sleep_20_ms(nullptr);
    --running;
  };
  cudaStream_t streams[2] = {make_stream(), make_stream()};
  for (cudaStream_t stream : streams) OK(cudaLaunchHostFunc(stream, stay, nullptr));
  for (cudaStream_t stream : streams) OK(cudaStreamSynchronize(stream));
  EXPECT(most == 1);
}

void copies() {
  cudaStream_t stream = make_stream();
  int *pinned = nullptr, *x = upload<int>(Ints{0}, stream);
  OK(cudaHostAlloc(&pinned, sizeof(int), cudaHostAllocDefault));
  *pinned = 1;
  OK(cudaLaunchHostFunc(stream, sleep_20_ms, nullptr));
  OK(cudaMemcpyAsync(x, pinned, sizeof(int), cudaMemcpyHostToDevice, stream));
  *pinned = 2;  // the copy reads when the stream gets there
  EXPECT(download<Ints>(x, 1, stream)[0] == 2);
  int pageable = 3;
  OK(cudaLaunchHostFunc(stream, sleep_20_ms, nullptr));
  OK(cudaMemcpyAsync(x, &pageable, sizeof(int), cudaMemcpyHostToDevice, stream));
  pageable = 4;  // taken at the call
  EXPECT(download<Ints>(x, 1, stream)[0] == 3);
  EXPECT_CODE(cudaMemcpyAsync(x, pinned, 8, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
  EXPECT_CODE(cudaMemcpyAsync(pinned, x, 4, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
  OK(cudaMemsetAsync(x, 0xff, 4, stream));
  EXPECT(download<Ints>(x, 1, stream)[0] == -1);
  OK(cudaLaunchHostFunc(stream, sleep_20_ms, nullptr));
  OK(cudaMemcpyAsync(x, pinned, sizeof(int), cudaMemcpyDefault, stream));
  EXPECT(download<Ints>(x, 1, stream)[0] == 2);
  cudaEvent_t slow = nullptr;
  OK(cudaEventCreateWithFlags(&slow, cudaEventDisableTiming));
  OK(cudaLaunchHostFunc(stream, sleep_20_ms, nullptr));
  OK(cudaEventRecord(slow, stream));
  OK(cudaFreeHost(pinned));
  EXPECT_CODE(cudaEventQuery(slow), cudaErrorNotReady);  // it waits for nothing
  OK(cudaStreamSynchronize(stream));
  (void)cudaGetLastError();
}

void memory() {
  cudaStream_t stream = make_stream();
  size_t before = 0, now = 0, total = 0;
  OK(cudaMemGetInfo(&before, &total));
  char* block = nullptr;
  EXPECT_CODE(cudaMallocAsync(&block, size_t{1} << 40, stream), cudaErrorMemoryAllocation);
  EXPECT(block == nullptr);
  EXPECT_CODE(cudaGetLastError(), cudaErrorMemoryAllocation);
  OK(cudaGetLastError());  // not sticky
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {cudaMemLocationTypeDevice, 0};
  cudaMemPool_t pool = nullptr;
  OK(cudaMemPoolCreate(&pool, &properties));
  OK(cudaMallocFromPoolAsync(&block, 1000, pool, stream));
  OK(cudaMemGetInfo(&now, &total));
  EXPECT(before - now == 1000);
  OK(cudaFreeAsync(block, stream));
  EXPECT_CODE(cudaFreeAsync(block, stream), cudaErrorInvalidValue);
  OK(cudaStreamSynchronize(stream));
  OK(cudaMemGetInfo(&now, &total));
  EXPECT(before == now);
  OK(cudaMemPoolDestroy(pool));
  OK(cudaStreamDestroy(stream));
  EXPECT_CODE(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  (void)cudaGetLastError();
}

void replay() {
  cudaStream_t stream = make_stream(), side = make_stream();
  int* x = upload<int>(Ints{1}, stream);
  OK(cudaStreamSynchronize(stream));
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  add<<<1, 1, 0, stream>>>(x, 10);
  cudaEvent_t fork = make_event(), join = make_event();
  OK(cudaEventRecord(fork, stream));
  OK(cudaStreamWaitEvent(side, fork));
  add<<<1, 1, 0, side>>>(x, 100);
  OK(cudaEventRecord(join, side));
  OK(cudaStreamWaitEvent(stream, join));
  cudaGraph_t graph = nullptr;
  OK(cudaStreamEndCapture(stream, &graph));
  EXPECT(download<Ints>(x, 1, stream)[0] == 1);  // recorded, not run
  size_t nodes = 0;
  OK(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT(nodes == 2);
  cudaGraphExec_t exec = nullptr;
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaGraphDestroy(graph));
  for (int i = 0; i < 3; ++i) OK(cudaGraphLaunch(exec, stream));
  OK(cudaGraphExecDestroy(exec));
  EXPECT(download<Ints>(x, 1, stream)[0] == 331);
}

/// Does `misuse` in a capture; it must give `code`, and the end of the capture `at_end`.
template <class Misuse>
void misused_capture(cudaStreamCaptureMode mode, Misuse misuse, cudaError_t code,
                     cudaError_t at_end = cudaErrorStreamCaptureInvalidated) {
  cudaStream_t stream = make_stream();
  OK(cudaStreamBeginCapture(stream, mode));
  EXPECT_CODE(misuse(stream), code);
  cudaGraph_t graph = nullptr;
  EXPECT_CODE(cudaStreamEndCapture(stream, &graph), at_end);
  OK(cudaStreamSynchronize(stream));  // and is usable again
  (void)cudaGetLastError();
}

void capture_errors() {
  const auto relaxed = cudaStreamCaptureModeRelaxed, global = cudaStreamCaptureModeGlobal;
  const auto unsupported = cudaErrorStreamCaptureUnsupported;
  int* x = upload<int>(Ints{1}, make_stream());
  int host = 0;
  void* block = nullptr;
  cudaEvent_t event = make_event(), outside = make_event();
  cudaStream_t other = make_stream();
  OK(cudaEventRecord(outside, other));
  misused_capture(relaxed, cudaStreamSynchronize, unsupported);
  misused_capture(relaxed, cudaStreamQuery, unsupported);
  misused_capture(
      relaxed,
      [&](cudaStream_t s) { return cudaMemcpyAsync(x, &host, 4, cudaMemcpyHostToDevice, s); },
      unsupported);
  misused_capture(
      relaxed,
      [&](cudaStream_t s) {
        OK(cudaEventRecord(event, s));
        return cudaEventQuery(event);
      },
      cudaErrorCapturedEvent);
  misused_capture(
      relaxed, [&](cudaStream_t s) { return cudaStreamWaitEvent(s, outside); },
      cudaErrorStreamCaptureIsolation);
  const auto allocate = [&](cudaStream_t) { return cudaMalloc(&block, 4); };
  misused_capture(global, allocate, unsupported);
  misused_capture(relaxed, allocate, cudaSuccess, cudaSuccess);
  misused_capture(
      relaxed,
      [&](cudaStream_t s) {
        OK(cudaEventRecord(event, s));
        OK(cudaStreamWaitEvent(other, event));
        add<<<1, 1, 0, other>>>(x, 1);
        return cudaGetLastError();
      },
      cudaSuccess, cudaErrorStreamCaptureUnjoined);
}

int main() {
  events();
  host_functions();
  copies();
  memory();
  replay();
  capture_errors();
  return expect_failures == 0 ? 0 : 1;
}
