"""The commands of users' own scripts: asked what they train, launched with the plan of an answer."""
