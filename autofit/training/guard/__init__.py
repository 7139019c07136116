"""The guard: a winner that trains something else than the float32 baseline is rejected."""
