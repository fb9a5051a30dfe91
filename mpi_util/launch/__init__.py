"""Starts the ranks of a job, watches them, ends them together, and says which one failed and why.

api.py is `mpi_fork`, which each rank calls too. The other files run in the waiting parent, which never starts MPI
(launcher.py also in the doctor; it, monitor.py and verdict.py also in agents of other hosts): fork.py makes the command
for the launcher that launcher.py finds, and starts a failed job again; supervise.py runs it, while monitor.py sees the
ranks and banners.py passes on what they print; verdict.py says who failed. What a rank does when it fails is in
ranks/failure.py. Several machines are in cluster/, which api.py loads only if hosts are named.

May import `collectives`, `ranks`, `arrays`, `host` and `errors`. Read first: api.py, fork.py, supervise.py.
"""
