// Graphs of a CudaStream: work that is captured instead of run, and then launched again and again.

#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep::cuda {
namespace {

class CudaGraph final : public Graph {
 public:
  CudaGraph(GraphExecHandle exec, const StreamBackend& stream)
      : exec_(std::move(exec)), stream_(stream) {}
  cudaGraphExec_t exec() const { return exec_.get(); }
  const StreamBackend& stream() const { return stream_; }

 private:
  GraphExecHandle exec_;  // CUDA keeps it until queued launches have run
  const StreamBackend& stream_;
};

}  // namespace

void CudaStream::refuse_in_capture(const char* what) const {
  require(!capturing_, "{}: '{}' on stream {} cannot be part of a graph; do it before or after",
          device().name(), what, name());
}

void CudaStream::begin_capture() {
  require(!capturing_, "{}: stream {} is being captured already", device().name(), name());
  record();
  check(cudaStreamBeginCapture(raw_.get(), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture",
        device().name());
  capturing_ = captured_ = true;
}

std::unique_ptr<Graph> CudaStream::end_capture() {
  require(capturing_, "{}: stream {} is not being captured", device().name(), name());
  capturing_ = false;
  cudaGraph_t captured = nullptr;
  const cudaError_t status = cudaStreamEndCapture(raw_.get(), &captured);
  const GraphHandle graph(captured);
  if (std::exception_ptr first = error()) std::rethrow_exception(first);  // it gives more detail
  check(status, "cudaStreamEndCapture", device().name());
  cudaGraphExec_t exec = nullptr;
  check(cudaGraphInstantiate(&exec, captured, 0), "cudaGraphInstantiate", device().name());
  return std::make_unique<CudaGraph>(GraphExecHandle(exec), *this);
}

void CudaStream::launch(Graph& graph) {
  const CudaGraph& recorded = dynamic_cast<CudaGraph&>(graph);
  require(&recorded.stream() == this, "{}: stream {} did not record this graph, {} did",
          device().name(), name(), recorded.stream().name());
  enqueue("graph", [&](cudaStream_t raw) {
    note(cudaGraphLaunch(recorded.exec(), raw), "cudaGraphLaunch");
  });
}

}  // namespace lockstep::cuda
