"""One Linux machine: its cores and threads, memory that processes share, how one waits for another, files.

Knows neither MPI nor arrays of a program. May import `errors` and the standard library (and NumPy, for views of shared
memory). Read first: segments.py (shared memory), waiting.py (how a rank sleeps and is woken).
"""
