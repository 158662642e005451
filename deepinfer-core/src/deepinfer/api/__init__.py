"""The only surface that a backend or another plugin may import; `descriptor.API_VERSION` covers all of it.

`descriptor` needs the standard library alone and is what a descriptor module imports. `errors` is as light.
`backend` and `ops` import torch and belong into the heavy module that the descriptor names.
"""
