"""Nested batches and models as named arrays: tree.py walks containers, adapters/ know each framework's tensors.

Knows no MPI and no ranks. May import `host` and `errors`. Read first: tree.py, then adapters/__init__.py. A new kind of
weights is a new module in adapters/.
"""
