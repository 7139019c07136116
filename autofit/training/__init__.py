"""Real training steps: run, timed, observed, compared."""
