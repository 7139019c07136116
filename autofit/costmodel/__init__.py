"""What a step will need before it runs: bytes from fake tensors, seconds from rates."""
