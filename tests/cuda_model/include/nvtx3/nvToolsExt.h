#pragma once
// NVTX ranges: nothing listens, but a range that is closed twice must show.

inline thread_local int cuda_model_nvtx_depth = 0;

/// Returns the depth of the new range from 0, as NVTX does; below 0 is an error.
inline int nvtxRangePushA(const char* message) {
  return message == nullptr ? -1 : cuda_model_nvtx_depth++;
}
inline int nvtxRangePop() { return cuda_model_nvtx_depth == 0 ? -2 : --cuda_model_nvtx_depth; }
