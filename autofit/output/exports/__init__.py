"""An answer for other programs: arguments, flags and YAML that people paste."""
