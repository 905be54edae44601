// libcuda: the driver's library, for programs that ask whether there is one.

#include "runtime/environment.h"

extern "C" int cuDriverGetVersion(int* version) {
  *version = cuda_model::integer_variable("CUDA_MODEL_DRIVER", cuda_model::kRuntimeVersion);
  return 0;
}
