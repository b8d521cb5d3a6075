"""Metal sources: common.h and one file a family of kernels. `mlx_engine.ops.launch` reads them."""
