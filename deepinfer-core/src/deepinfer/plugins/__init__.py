"""Room: plugins."""
