#pragma once
// For coursework (docs/coursework.md).

namespace lockstep {

/// Replaces a task's lines in a student's tree: throws OpenTask (error.h). A function, because
/// compilers for GPUs refuse a `throw` in a kernel.
[[noreturn]] void open_task(const char* text);

}  // namespace lockstep
