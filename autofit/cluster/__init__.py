"""Trials on the machines of a Ray cluster: Ray places and watches."""
