"""What was measured on a device, kept in a file, and played back without it."""
