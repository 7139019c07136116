"""What a script's text and its running frames tell of it."""
