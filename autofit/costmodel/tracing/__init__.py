"""A trace: the recipe run on fake tensors, each allocation and each operator's work written down."""
