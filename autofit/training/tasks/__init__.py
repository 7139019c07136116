"""What a model is trained for: one file a family of tasks, each with the batch that its models train on."""
