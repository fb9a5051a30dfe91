"""The training program around the algorithms of `policies`: settings, rollouts, run folder, screen, advice.

It uses public names of `mpi_util` and its satellites; of it, `play.load_policy` is for your programs. Read `config`
first, then `run` (what a rank holds), `collect` (episodes on every rank, and which rank learns from which rows) and
`training` (one update; ranks that only collect load neither this nor torch nor TensorFlow)."""
