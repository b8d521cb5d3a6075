// Replaces MLX's header of this name, whose methods differ by address space alone: enough of a
// complex number for MLX's utils.h to compile. Kernels of complex arrays are not emulated.
#pragma once

#include "mlx/backend/metal/kernels/bf16.h"

template <typename T>
struct complex_t {
  T real;
  T imag;
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
  constexpr complex_t() : real(0), imag(0) {}
};
typedef complex_t<float> complex64_t;
