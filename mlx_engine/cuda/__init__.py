"""CUDA sources and the factory that builds kernels from them and from those of metal/."""
