"""One module a command: a request in, an answer out."""
