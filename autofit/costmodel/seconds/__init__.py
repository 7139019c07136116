"""How long a step takes on a card: laws of operators and collectives, and what binds it."""
