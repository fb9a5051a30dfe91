"""What one rank's program calls besides the collectives: printing, timing, seeding, signals, TensorFlow's set-up.

Nothing here communicates. May import `launch`, `host`, `arrays` and `errors`. Read first: signals.py; each file stands
alone.
"""
