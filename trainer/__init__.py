"""The training program around the algorithms of `policies`: settings, rollouts, run folder, screen, advice.

It uses public names of `mpi_util` and its satellites; of it, `play.load_policy` is for your programs. Read `config`
first, then `run` (what a rank holds), `collect` (episodes on every rank, and which rank learns from which rows) and
`training` (one update), which ranks that only collect never load, nor torch or TensorFlow."""
