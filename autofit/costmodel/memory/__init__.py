"""Bytes: from the tapes of a plan's parts to its peak, and what PyTorch's caching allocator reserves for them."""
