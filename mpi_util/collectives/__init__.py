"""Everything that ranks do together: gather, broadcast, reduce, average, deal.

Each call first agrees over the channel (channel.py: small messages, a star around rank 0), then moves the bytes
(transport.py: shared memory on one machine, MPI between machines). May import `program`, `launch`, `arrays`, `host` and
`errors`. Read first: channel.py, transport.py, gather.py.
"""
