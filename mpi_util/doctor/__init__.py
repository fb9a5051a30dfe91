"""`python -m mpi_util doctor`, in a process of its own: will a job run on this machine, and if not, what is to be done.

May import everything else in the package; nothing imports it. Read first: checks.py.
"""
