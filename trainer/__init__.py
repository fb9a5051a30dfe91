"""The training program around the algorithms of `policies`: settings, rollouts, run folder, screen, advice.

It imports `policies` and public names of `mpi_util` and its satellites; only train.py, the tests and the benchmarks
import it. Read `config` first, then `run` (what a rank holds), `collect` (episodes on every rank, and which rank learns
from which rows) and `training` (one update). Ranks that only collect load neither torch nor TensorFlow.
"""
