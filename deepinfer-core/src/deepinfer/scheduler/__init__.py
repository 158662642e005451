"""Room: scheduler."""
