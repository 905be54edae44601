#pragma once
// The words before each function that two compilers compile: g++ for CPU devices, nvcc for GPUs. A
// backend whose processor needs other words defines this macro before it includes such functions
// (kernels/cuda/launch.cuh).

#ifndef LOCKSTEP_BODY
#define LOCKSTEP_BODY inline __attribute__((always_inline))
#endif
