"""What stands in for a device in a trace: fake tensors, CUDA's habits, and the memory that its kernels take."""
