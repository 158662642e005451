"""Room: api."""
