"""Kernels: the work of one item, for every target; the only room that imports Numba."""
