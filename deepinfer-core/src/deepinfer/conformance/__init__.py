"""Room: conformance."""
