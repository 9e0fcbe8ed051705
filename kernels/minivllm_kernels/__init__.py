"""numba kernels."""
