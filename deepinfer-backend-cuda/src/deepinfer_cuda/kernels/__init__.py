"""Triton kernels by family, as the families of `deepinfer.api.ops`.

Each module has portable kernels, which run in Triton's interpreter and on every architecture, functions with the
signatures of the contracts around them, and `kernels(numerics)`, which says what of them is bound. A kernel whose rows
depend on nothing but themselves promises row-invariance; another one is left out if `numerics.batch_invariant`.
"""
