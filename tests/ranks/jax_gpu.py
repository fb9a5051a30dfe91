"""JAX on a machine with a GPU: on rank 0 alone, as the documentation shows, or on every rank with a share of it."""

import subprocess
import sys

import mpi_util

everywhere = sys.argv[2] == "everywhere"
if mpi_util.mpi_fork(int(sys.argv[1]), gpu_pct=0.05 if everywhere else 0.0) == "parent":
    sys.exit()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import run_checks

if mpi_util.rank and not everywhere:
    jax.config.update("jax_platforms", "cpu")
HERE = jax.devices()[0]
assert (HERE.platform == "gpu") == (everywhere or mpi_util.rank == 0), HERE


def check_weights(comm, rank, size):
    """Each rank's come to lie where its own did; rank 0's copy on the CPU acts as the others'."""
    params = {"w": jnp.full((300, 300), float(rank)), "half": jnp.full(3, rank, jnp.bfloat16), "key": jax.random.key(3)}
    state = (params, optax.adam(0.1).init({"w": params["w"]}))
    got = mpi_util.rank0_bcast_wts(state, comm=comm)
    assert {leaf.device for leaf in jax.tree.leaves(got)} == {HERE}
    assert got[0]["w"].sum() == 0 and got[0]["half"].tolist() == [0, 0, 0]
    mean = mpi_util.all_avg_wts(params, comm=comm)
    assert mean["w"].device == HERE and mean["w"][0, 0] == (size - 1) / 2
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(rank))
    assert mpi_util.rank0_bcast_wts(model, comm=comm) is model and model.kernel[...].device == HERE
    weights, structure = jax.tree.flatten(model)
    weights, obs = jax.device_put((weights, np.linspace(-1, 1, 64, dtype="f4")), jax.devices("cpu")[0])
    act = jax.jit(lambda weights, obs: jnp.tanh(jax.tree.unflatten(structure, weights)(obs)))(weights, obs)
    assert act.device.platform == "cpu"
    digests = mpi_util.rank0_gather(np.asarray(act).tobytes(), comm=comm)
    assert len({*digests}) == 1


def check_rows(comm, rank, size):
    """They come back where rank 0's lay, and stay when the memory that they came through is used again."""
    batch = {name: jnp.full((rank + 1, 2), rank, name) for name in ("bfloat16", "float8_e4m3fn", "float32", "int8")}
    batch |= {"key": jax.random.split(jax.random.key(rank), 2), "large": jnp.full((90_000, 2), float(rank))}
    kept = mpi_util.all_accum_batches(batch, comm=comm)
    for other in range(5):
        mpi_util.all_accum_batches({"large": jnp.full((90_000, 2), other + 7.0)}, comm=comm)
    assert {leaf.device for leaf in jax.tree.leaves(kept)} == {HERE}
    for name in ("bfloat16", "float8_e4m3fn", "float32", "int8"):
        assert kept[name].dtype == name
        assert kept[name][:, 0].astype("float32").tolist() == [k for k in range(size) for _ in range(k + 1)]
    assert np.array_equal(np.unique(kept["large"]), np.arange(size)) and kept["key"].shape == (2 * size,)


def check_sums(comm, rank, size):
    got = mpi_util.all_sum({"x": jnp.full(2, rank + 1), "half": jnp.ones(1, jnp.bfloat16)}, comm=comm)
    assert got["x"].tolist() == [size * (size + 1) // 2] * 2 and {leaf.device for leaf in got.values()} == {HERE}
    mean = mpi_util.all_mean(jnp.full(2, float(rank)), comm=comm)
    assert mean.device == HERE and mean.tolist() == [(size - 1) / 2] * 2


def check_memory(comm, rank, size):
    """No rank has taken the three quarters of the GPU that JAX takes by itself."""
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    used, total = map(int, subprocess.check_output(query, text=True).splitlines()[0].split(","))
    assert used < total / 4, f"{used} of {total} MiB"


run_checks(globals())
