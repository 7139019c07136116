"""Traces of users' own scripts: the script makes the model, the rows and the loss, and they train on fake tensors."""
