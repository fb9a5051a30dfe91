"""What a rank is and calls alone, in each rank's process: who it is, how it fails, waits, seeds, prints and stops.

The waiting parent uses identity, records, and the printing and environment of failure and threads. runner.py runs the
program; the program calls the other files. Nothing here communicates through MPI. May import `host`,
`arrays` and `errors`. Read first: identity.py, failure.py.
"""
