"""Starts the ranks of a job, watches them, ends them together, and says which one failed and why.

api.py is `mpi_fork`, which each rank calls too. The other files run in the waiting parent, which never starts MPI
(launcher.py also in the doctor; it, monitor.py and verdict.py also in agents of other hosts).

May import `collectives`, `ranks`, `arrays`, `host` and `errors`. Read first: api.py, fork.py, supervise.py.
"""
