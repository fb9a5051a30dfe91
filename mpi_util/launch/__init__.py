"""Starts the ranks of a job, watches them, ends them together, and says which one failed and why.

api.py is `mpi_fork`, which each rank calls too. All other files run in the waiting parent only, which never loads MPI:
fork.py makes the command for the launcher that launcher.py finds; supervise.py runs it, while monitor.py sees the ranks
and banners.py passes on what they print; verdict.py says who failed; restarts.py starts the job again.

May import `collectives`, `ranks`, `arrays`, `host` and `errors`. Read first: api.py, fork.py, supervise.py.
"""
