"""Nested batches and models as named arrays, in every rank, and in workers that weights are sent to.

Knows no MPI and no ranks. May import `host` and `errors`. Read first: tree.py, layout.py, adapters/__init__.py.
"""
