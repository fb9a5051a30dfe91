"""Environments that are MPI programs themselves: on several ranks of the job, or started by a command.

It runs in each worker, in the members of its team, and, served.py, in what a command has started. A copy may leave the
folder out, and serve.py with it. May import `launch`, `collectives`, `ranks`, `arrays`, `host` and `errors`.
Read first: environment.py, team.py, process.py.
"""
