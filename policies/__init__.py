"""The algorithms: a NumPy actor, update rules, learners, observation scaling; each is written once.

Nothing here knows MPI, mpi_util or the training program. `actor`, `mlp` and `scaler` need only NumPy: they are what
every rank imports. `backend` says what a framework provides; the packages `numpy`, `torch` and `tf` provide it, and do
not import each other. Read `actor` first, then `hyper` (the settings), `rules` and `backend`; `data_parallel` says how
several learners share one batch.
"""
