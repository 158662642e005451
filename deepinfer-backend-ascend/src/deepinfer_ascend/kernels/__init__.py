"""Kernels by op family; operations that are not here run their references, which are made of aten operations."""
