"""Room: backend."""
