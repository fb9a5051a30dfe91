"""Starts the ranks of a job, watches them, ends them together, and says which one failed and why.

fork.py starts the program again under the launcher that launcher.py finds, on the hosts that hosts.py names;
supervise.py runs in the process that waits, collects evidence (watch.py) and cleans up (reap.py), verdict.py names the
rank that failed, and restarts.py starts it again. On each other host an agent does what that process does here:
agent.py, which it reaches by remote.py; rsh.py is what the launcher runs in place of ssh.
failure.py is the other side: what a rank does when it fails; watchdog.py: when another one does not come. identity.py:
which rank this is; doctor.py: whether a job will run here. May import `host` and `errors`; the process that waits never
loads MPI. Read first: fork.py, failure.py.
"""
