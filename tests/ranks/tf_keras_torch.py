"""Keras on torch: weights, optimizers and averaged gradients."""

import os

from harness import fork

fork()
os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import mpi_util  # noqa: E402
from mpi_util_spinup import mpi_tf  # noqa: E402

torch.set_num_threads(1)
rank, size = mpi_util.rank, mpi_util.nworkers


def model(seed, already_made=0):
    for _ in range(already_made):
        keras.layers.Dense(1)
    keras.utils.set_random_seed(seed)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    net.add(keras.layers.Dense(2, dtype="bfloat16"))
    net(torch.randn(8, 3), training=True)
    return net


net, reference = model(rank, already_made=rank), model(0)
tensors = [w.value for w in net.weights]
mpi_util.rank0_bcast_wts(net)
assert all(np.array_equal(a, b) for a, b in zip(net.get_weights(), reference.get_weights(), strict=True))
assert all(w.value is tensor for w, tensor in zip(net.weights, tensors))
assert mpi_util.chksum(net) == mpi_util.chksum(reference)

gathered = mpi_util.rank0_accum_batches({"w": net.weights[0]})["w"]
assert rank or (isinstance(gathered, torch.Tensor) and gathered.shape == (3 * size, 4))

x = np.random.default_rng(0).normal(size=(4, size, 6, 3)).astype("f4")  # batch, rank, row


def fit(optimizer, x):
    keras.utils.set_random_seed(0)
    learner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    learner.compile(optimizer, "mse")
    learner.fit(x.reshape(-1, 3), x.reshape(-1, 3)[:, :2] ** 2, batch_size=x[0].size // 3, shuffle=False, verbose=0)
    return learner


alone = fit(keras.optimizers.Adam(0.01), x)
together = fit(mpi_tf.average_gradients(keras.optimizers.Adam(0.01)), x[:, rank])
assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(alone.get_weights(), together.get_weights()))

adam = keras.optimizers.Adam(10.0**-rank)
adam.build(net.trainable_variables)
adam.apply([torch.full(tuple(w.shape), rank + 1.0) for w in net.trainable_variables])
mpi_util.rank0_bcast_wts(adam)
assert float(adam.learning_rate) == 1 and float(adam.variables[2].value.max()) == float(adam.variables[2].value.min())
assert len(set(mpi_util.all_accum_batches([mpi_util.chksum(adam)]))) == 1
mpi_util.print0("Keras on torch is in order")
