"""The version, in a module that imports nothing: any package may read it."""

__version__ = "0.1.0"
