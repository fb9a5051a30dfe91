"""Other libraries' training programs on N ranks, in one line: sb3.py for Stable-Baselines3's on-policy algorithms.

May import `collectives` and what is below it; nothing imports it, so a program without that library may delete this
folder. Read first: `parallel` in sb3.py.
"""
