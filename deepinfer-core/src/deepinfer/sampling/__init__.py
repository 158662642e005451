"""Room: sampling."""
