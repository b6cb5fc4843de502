"""Fused kernels for the parts of a decoding cycle and of training that are as wide as the vocabulary.

One folder per op: `api.py` (checks its arguments and picks an implementation), `reference.py` (plain jax, the
definition), one file per backend, `shapes.py` (the cases that tests and bench share). Depends on jax only.
"""
