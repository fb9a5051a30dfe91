"""Several machines: hosts and the agents on them, sums between machines. Loaded only if there are several.

May import `collectives`, `launch`, `rank`, `arrays`, `host` and `errors`. Read first: hosts.py, agent.py, chain.py.
"""
