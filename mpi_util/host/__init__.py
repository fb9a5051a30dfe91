"""One Linux machine, for any process on it: cores, memory that processes share, how one waits for another.

Imports nothing of ranks or MPI; reap.py knows the names of the files that a job and MPI leave. May import `errors` and
the standard library (and NumPy, for views of shared memory). Read first: segments.py, waiting.py, reap.py.
"""
