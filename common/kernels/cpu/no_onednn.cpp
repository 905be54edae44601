#include "common/kernels/cpu/engine.h"

namespace lockstep::cpu {

EngineMaker onednn_engine() { return {}; }

}  // namespace lockstep::cpu
