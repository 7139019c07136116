"""Some training steps under PyTorch's profiler: where their time goes, by kind of work."""
