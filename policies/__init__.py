"""The algorithms: a NumPy actor, update rules, learners in PyTorch and TensorFlow, advantages, observation scaling.

Nothing here knows MPI, mpi_util or the training program. `actor`, `returns` and `scaler` need only NumPy, and are what
every rank imports; `pytorch` and `tf` hold the learners, do not import each other, and do the same. Read `actor` first,
then `hyper` (the settings), `rules` and `pytorch.ppo`; `share` says how several learners share one batch.
"""
