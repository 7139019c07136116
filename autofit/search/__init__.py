"""Which plan is tried next, and which one wins; knows no device."""
