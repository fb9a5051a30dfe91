"""Nested batches and models as named arrays: tree.py walks containers, layout.py places named arrays in one block of
bytes, adapters/ know each framework's tensors.

Knows no MPI and no ranks. May import `host` and `errors`. Read first: tree.py, layout.py, then adapters/__init__.py. A
new kind of weights is a new module in adapters/.
"""
