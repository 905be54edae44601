#include "cublas_v2.h"

#include <algorithm>

#include "libraries/sixteen.h"
#include "libraries/tf32.h"
#include "runtime/model.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

using namespace cuda_model;

namespace {

struct Gemm {
  bool transpose_a, transpose_b;
  int m, n, k;
  float alpha, beta;
  const void* a;
  const void* b;
  void* c;
  Number number, result;  // of a and b, and of c
  int lda, ldb, ldc;
  bool tf32;
  bool rounds_parts = false;  // cuBLAS may add parts of a long sum in the type of c
};

/// op(X) of `rows` x `columns`, column-major and without gaps.
std::vector<float> pack(const Gemm& g, const void* x, int ld, bool transpose, int rows,
                        int columns) {
  std::vector<float> packed(static_cast<size_t>(rows) * columns);
  for (int column = 0; column < columns; ++column) {
    for (int row = 0; row < rows; ++row) {
      const size_t at = transpose ? size_t(row) * ld + column : size_t(column) * ld + row;
      const float value = load(g.number, x, at);
      packed[size_t(column) * rows + row] = g.tf32 ? to_tf32(value) : value;
    }
  }
  return packed;
}

float rounded(Number kind, float x) {
  float memory = 0;
  store(kind, x, &memory, 0);
  return load(kind, &memory, 0);
}

/// C = alpha op(A) op(B) + beta C; where beta is 0, C is not read.
void run(const Gemm& g) {
  const std::vector<float> a = pack(g, g.a, g.lda, g.transpose_a, g.m, g.k);
  const std::vector<float> b = pack(g, g.b, g.ldb, g.transpose_b, g.k, g.n);
  std::vector<double> sums(g.m);
  for (int column = 0; column < g.n; ++column) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int i = 0; i < g.k; ++i) {
      const double factor = b[size_t(column) * g.k + i];
      const float* a_column = a.data() + size_t(i) * g.m;
      for (int row = 0; row < g.m; ++row) sums[row] += factor * a_column[row];
      if (g.rounds_parts && i == g.k / 2) {
        for (double& sum : sums) sum = rounded(g.result, float(sum));
      }
    }
    for (int row = 0; row < g.m; ++row) {
      const size_t at = size_t(column) * g.ldc + row;
      const double before = g.beta == 0 ? 0.0 : double(g.beta) * load(g.result, g.c, at);
      store(g.result, float(g.alpha * sums[row] + before), g.c, at);
    }
  }
}

Number kind_of(cudaDataType type) {
  if (type == CUDA_R_16BF) return Number::bf16;
  return type == CUDA_R_16F ? Number::fp16 : Number::real;
}

cublasStatus_t enqueue(cublasHandle_t handle, const Gemm& g) {
  if (g.m < 0 || g.n < 0 || g.k < 0 || g.lda < std::max(1, g.transpose_a ? g.k : g.m) ||
      g.ldb < std::max(1, g.transpose_b ? g.n : g.k) || g.ldc < std::max(1, g.m)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (g.m == 0 || g.n == 0) return CUBLAS_STATUS_SUCCESS;
  void* workspace = handle->workspace;
  const size_t bytes = std::min<size_t>(handle->workspace_bytes, 4096);
  const cudaError_t error = enqueue_kernel(handle->stream, [=] {
    if (workspace != nullptr) std::memset(workspace, 0xa5, bytes);
    run(g);
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

template <class Body>
cublasStatus_t call(const char* function, cublasHandle_t handle, Body body) {
  if (const int planted = planted_code(function)) return static_cast<cublasStatus_t>(planted);
  return handle == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : body();
}

}  // namespace

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  if (const int planted = planted_code("cublasCreate")) return cublasStatus_t(planted);
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (admit("") != cudaSuccess || current_device() == nullptr || sticky_error() != cudaSuccess) {
    return CUBLAS_STATUS_NOT_INITIALIZED;
  }
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  return call("cublasDestroy", handle, [&] {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasGetVersion(cublasHandle_t handle, int* version) {
  return call("cublasGetVersion", handle, [&] {
    *version = 130000;
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  return call("cublasSetStream", handle, [&] {
    handle->stream = stream;
    handle->workspace = nullptr;  // as documented: back to the library's own workspace
    handle->workspace_bytes = 0;
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes) {
  return call("cublasSetWorkspace", handle, [&] {
    if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    handle->workspace = workspace;
    handle->workspace_bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  return call("cublasSetMathMode", handle, [&] {
    handle->math = mode;
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  return call("cublasGetMathMode", handle, [&] {
    *mode = handle->math;
    return CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t mode) {
  return call("cublasSetAtomicsMode", handle, [&] {
    return mode <= CUBLAS_ATOMICS_ALLOWED ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
  });
}

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t transa,
                           cublasOperation_t transb, int m, int n, int k, const float* alpha,
                           const float* A, int lda, const float* B, int ldb, const float* beta,
                           float* C, int ldc) {
  return call("cublasSgemm", handle, [&] {
    if (alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    const bool tf32 = (handle->math & 15) == CUBLAS_TF32_TENSOR_OP_MATH;
    return enqueue(handle, {transa != CUBLAS_OP_N, transb != CUBLAS_OP_N, m, n, k, *alpha, *beta, A,
                            B, C, Number::real, Number::real, lda, ldb, ldc, tf32});
  });
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void* alpha,
                            const void* A, cudaDataType Atype, int lda, const void* B,
                            cudaDataType Btype, int ldb, const void* beta, void* C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t computeType,
                            cublasGemmAlgo_t) {
  return call("cublasGemmEx", handle, [&] {
    if (alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    // The sums of 16-bit products that cuBLAS's documentation lists for a compute type of float32.
    if (computeType != CUBLAS_COMPUTE_32F || Atype != Btype || Atype == CUDA_R_32F ||
        (Ctype != Atype && Ctype != CUDA_R_32F)) {
      return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    const bool parts_in_float32 = handle->math & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    const float one = *static_cast<const float*>(alpha);  // of the compute type
    return enqueue(handle, {transa != CUBLAS_OP_N, transb != CUBLAS_OP_N, m, n, k, one,
                            *static_cast<const float*>(beta), A, B, C, kind_of(Atype),
                            kind_of(Ctype), lda, ldb, ldc, /*tf32=*/false, !parts_in_float32});
  });
}

const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR:
      return "CUBLAS_STATUS_LICENSE_ERROR";
  }
  return "CUBLAS_STATUS_UNKNOWN";
}

const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an invalid value was used as a parameter";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "an internal operation failed";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the functionality is not supported";
    default:
      return cublasGetStatusName(status);
  }
}
