"""One Linux machine, for any process on it: cores, memory that processes share, how one waits for another.

Knows neither ranks nor MPI. May import `errors` and the standard library (and NumPy, for views of shared memory).
Read first: segments.py (shared memory), waiting.py (how a process sleeps and is woken), reap.py (ends a job).
"""
