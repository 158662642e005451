"""The built-in reference backend: plain PyTorch on the processor, row-invariant."""
