"""The surrogate: what the measured plans say about the step time and the peak memory of all others."""
