"""Whole training steps that others measured, as programs that can be traced, and what is predicted of them."""
