"""A run on disk, and its mirror in MLflow."""
