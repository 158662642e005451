"""Which rows run in the next step and who holds which memory (NumPy only, no torch)."""
