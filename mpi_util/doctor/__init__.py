"""`python -m mpi_util doctor`: will a job run on this machine, and if not, what is to be done. A process of its own.

May import everything else in the package; nothing imports it. Read first: checks.py.
"""
