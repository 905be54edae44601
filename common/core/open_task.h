#pragma once
// For coursework (docs/coursework.md).

namespace lockstep {

/// What stands in a student's tree in place of a task's lines: throws OpenTask (error.h). A
/// function, because compilers for GPUs refuse a `throw` in a kernel.
[[noreturn]] void open_task(const char* text);

}  // namespace lockstep
