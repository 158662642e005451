"""Room: checkpoint."""
