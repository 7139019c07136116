"""What ``estimate`` computes and shows: plans on a card that is not here, their table, and what stops the others."""
