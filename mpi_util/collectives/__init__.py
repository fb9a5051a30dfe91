"""Everything that ranks do together: gather, broadcast, reduce, average, deal. It runs in the process of each rank.

A call first agrees (agreement.py); then the channel moves the bytes (channel.py). May import `ranks`, `arrays`, `host`
and `errors`, and in channel.py, where ranks lie on several machines, `cluster`. Read first: channel.py, gather.py.
"""
