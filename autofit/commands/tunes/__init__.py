"""One tune: its course from the facts to the files, what it measures on, and the folder it leaves."""
