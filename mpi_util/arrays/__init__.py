"""Nested batches and models as named arrays, in every rank, and in workers that weights are sent to.

tree.py walks dicts, lists and tuples; layout.py says where arrays lie in one block of bytes; adapters/ has one file for
each framework. Knows no MPI and no ranks. May import `host` and `errors`. Read first: tree.py, layout.py,
adapters/__init__.py. A new kind of weights is a new file in adapters/ and a line in `_ADAPTERS` of its `__init__.py`.
"""
