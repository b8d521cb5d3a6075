"""Every kernel of ours, executed, against the MLX operations that it replaces."""
