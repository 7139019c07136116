"""Processes, files, locks and numbers; nothing of training."""
