// Stands for metal_stdlib: lets clang compile Metal Shading Language as C++17 for x86-64.
//
// Address spaces vanish here (the strict pass checks them); the runtime tells them by address.
#pragma once
#define __METAL_VERSION__ 310
#define MLX_METAL_JIT 1
#define METAL_FUNC inline __attribute__((always_inline))
#define device
#define constant const
#define thread
#define threadgroup
#define kernel

#include "msl/constants.h"
#include "msl/math.h"
#include "msl/matrix.h"
#include "msl/memory.h"
#include "msl/simd.h"
#include "msl/traits.h"
#include "msl/types.h"

// After everything else, because its macros bear the names of types.
#include "msl/constructors.h"
