"""Where optimizer state lives. Knows nothing about optimizers."""
