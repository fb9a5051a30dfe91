"""Several machines. Loaded only if hosts are named, or if ranks share no memory; else a copy works without it.

In the waiting parent: hosts.py (which hosts) and monitor.py (their agents, and the job's processes there). On each
other host: agent.py; beside the launcher: rsh.py. In the ranks: the other files.

May import what is not `doctor` or `compat_2017`. Read first: hosts.py, monitor.py, channel.py.
"""
