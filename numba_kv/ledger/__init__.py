"""Host bookkeeping in plain integers: page ids, rows, leases. No device, no Numba."""
