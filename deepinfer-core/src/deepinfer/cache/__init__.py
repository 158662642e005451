"""Room: cache."""
