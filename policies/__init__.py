"""Policies, value functions and the arithmetic around them. Nothing here knows of MPI.

``actor``, ``returns`` and ``scaler`` need NumPy only and are what every rank imports; the learners of rank 0 live in
one folder per framework.
"""
