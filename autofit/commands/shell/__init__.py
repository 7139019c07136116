"""The command line's side of every command: options, errors and exit codes, what a person sees."""
