"""Keras 3 on JAX: rank 0 fits a model, and its weights, statistics and optimizer come to all ranks in place."""

import keras
import numpy as np
from harness import fork

import mpi_util

fork()

keras.utils.set_random_seed(mpi_util.rank)
hidden = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
model.compile("adam", "mse")
model.optimizer.build(model.trainable_variables)
rng = np.random.default_rng(mpi_util.rank)
for _ in range(3):
    assert mpi_util.rank0_bcast_wts(model) is model
    both = [model, model.optimizer]
    assert mpi_util.rank0_bcast_wts(both) is both
    obs = rng.normal(size=(6, 4)).astype(np.float32)
    rows = {"obs": obs, "out": model(obs[:2])}  # as a policy: arrays of JAX
    batch = mpi_util.rank0_accum_batches(rows)
    if mpi_util.rank == 0:
        assert type(batch["out"]) is type(rows["out"]) and batch["out"].shape == (2 * mpi_util.nworkers, 1)
        x = batch["obs"]
        history = model.fit(x, x.sum(1), epochs=2, batch_size=6, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
mpi_util.rank0_bcast_wts(model)
if mpi_util.rank == 0:
    model.optimizer.learning_rate = 0.5
mpi_util.rank0_bcast_wts(model.optimizer)
sums = mpi_util.all_accum_batches([mpi_util.chksum([model, model.optimizer])])
assert len({*sums}) == 1 and float(model.optimizer.learning_rate) == 0.5
assert mpi_util.all_mean({"w": model.weights[0]})["w"].shape == (4, 8)
mpi_util.print0("done")
