// Replaces MLX's header of this name: its methods differ by address space alone.
#pragma once

namespace mlx {
struct os_log {
  constexpr os_log(constant char*, constant char*) {}
  template <typename... Args>
  void log_debug(constant char*, Args...) const {}
};
}  // namespace mlx
