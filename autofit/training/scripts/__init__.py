"""A user's own training script, run unmodified: up to its training, through a few measured steps, or as it is."""
