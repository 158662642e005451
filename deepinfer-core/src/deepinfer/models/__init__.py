"""Room: models."""
