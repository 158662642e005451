"""Room: cpu."""
