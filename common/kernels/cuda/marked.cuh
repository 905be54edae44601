#pragma once
// How an optimizer's bodies run on a GPU: they pass over the numbers of parameters without a
// gradient.

#include "common/kernels/cuda/launch.cuh"

namespace lockstep::cuda {

/// A thread looks for its element's stretch only where it has left the one before.
template <class Index, class Body>
__global__ void __launch_bounds__(kBlock)
    each_marked_kernel(Index n, bodies::Marked marked, Body body) {
  if (!body.enabled()) return;
  const Stretch* stretch = marked.stretches;
  Index end = 0;
  bool updates = false;
  decltype(bodies::prepared_for(body, 0)) run;
  grid_stride(n, [&](Index i) {
    if (i >= end) {
      while (i >= Index(stretch->end)) ++stretch;
      end = Index(stretch->end);
      updates = marked.updates(*stretch);
      run = bodies::prepared_for(body, stretch->parameter);
    }
    if (updates) run(i);
  });
}

struct MarkedLaunch : ElementLaunch {
  /// body(i) for i in [0, n) in marked stretches; each of them is prepared by itself.
  template <class Body>
  static void for_each_marked(Stream stream, const char* op, int64_t n, bodies::Marked marked,
                              Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      with_narrow_index(n, [&](auto count) {
        each_marked_kernel<<<blocks_for(n, s), kBlock, 0, raw>>>(count, marked, body);
      });
    });
  }
};

}  // namespace lockstep::cuda
