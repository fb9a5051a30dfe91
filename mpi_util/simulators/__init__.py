"""Environments that are MPI programs themselves, in each rank of one. A copy may lack it, and serve.py with it.

May import `launch`, `collectives`, `ranks`, `arrays`, `host` and `errors`. Read first: environment.py, team.py.
"""
