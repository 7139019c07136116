"""What a tune leaves: the document, the files and the report, and how they are read back."""
