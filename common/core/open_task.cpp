#include "common/core/open_task.h"

#include "common/core/error.h"

namespace lockstep {

void open_task(const char* text) { throw OpenTask(text); }

}  // namespace lockstep
