"""Two checks: will a job run on this machine (`python -m mpi_util doctor`, in a process of its own), and does an
environment repeat an episode (`check_replay`, in any process).

May import everything else in the package; only the public name `check_replay` imports from it. Read first: checks.py.
"""
