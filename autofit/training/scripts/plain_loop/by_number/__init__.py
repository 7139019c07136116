"""What a script's text does by the number of its batches: a plain loop's, or a function's that a Trainer calls."""
