"""Op contracts by family: names, references, samples, tolerances (design 5)."""
