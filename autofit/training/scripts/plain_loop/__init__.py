"""A script's plain loop with Accelerate: what is told of it, how it is measured, and how it trains with a plan."""
