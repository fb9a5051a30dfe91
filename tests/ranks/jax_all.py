"""JAX: trees of weights, Flax's TrainState and nnx modules, gathered arrays and keys, sums; at any number of ranks."""

import contextlib
import io
import pathlib
import types
from functools import partial
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from harness import fork, raises, run_checks

import mpi_util

fork()
jax.config.update("jax_num_cpu_devices", 2)
DTYPES = ["bfloat16", "float8_e4m3fn", "float16", "float32", "int8", "int32", "uint16", "bool", "complex64"]


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


@jax.tree_util.register_pytree_node_class
class Registered:
    def __init__(self, w, name):
        self.w, self.name = w, name

    def tree_flatten(self):
        return (self.w,), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


def tree(rank):
    return {
        "pair": Pair(jnp.full(3, rank), jnp.arange(2.0) + rank),
        "list": [jnp.full((2, 0), rank, jnp.bfloat16), (jnp.float32(rank), None)],
        "key": jax.random.split(jax.random.key(rank), 2),
        "of the class": Registered(jnp.full(2, rank, jnp.bfloat16), f"rank {rank}"),
        "function": lambda: rank,
        "count": rank,
    }


def check_trees(comm, rank, size):
    given = tree(rank)
    before = mpi_util.chksum(given)
    got = mpi_util.rank0_bcast_wts(given, comm=comm)
    assert mpi_util.chksum(got) == mpi_util.chksum(tree(0)) and mpi_util.chksum(given) == before
    assert isinstance(got["pair"], Pair) and isinstance(got["list"][1], tuple) and type(got["count"]) is int
    assert got["pair"].left.weak_type == given["pair"].left.weak_type  # decides the dtype of a product
    assert got["function"]() == rank and got["of the class"].name == f"rank {rank}"  # each rank's own
    kept = np.array(got["pair"].right)
    for other in range(3):  # the memory that it came through is used again
        mpi_util.rank0_bcast_wts(tree(other + 7), comm=comm)
    assert np.array_equal(got["pair"].right, kept) and np.array_equal(kept, [0, 1])
    mean = mpi_util.all_avg_wts(tree(rank), comm=comm)
    assert mean["pair"].right.tolist() == [(size - 1) / 2, (size - 1) / 2 + 1] and mean["count"] == 0
    bare = mpi_util.rank0_bcast_wts(jnp.full(2, float(rank)), comm=comm)
    assert bare.tolist() == [0, 0] and isinstance(bare, jax.Array)


def check_arrays_beside_it(comm, rank, size):
    table, model = np.full(2, rank), {"w": jnp.full(2, rank)}
    got = mpi_util.rank0_bcast_wts([model, table], comm=comm)
    assert got[1] is table and table.tolist() == [0, 0]  # in place, as everywhere
    assert got[0]["w"].tolist() == [0, 0] and model["w"].tolist() == [rank, rank]
    alone = {"w": np.full(2, rank), 1: np.full(2, rank)}  # keys that JAX cannot sort
    assert mpi_util.rank0_bcast_wts(alone, comm=comm) is alone and alone[1].tolist() == [0, 0]


def check_numbers(comm, rank, size):
    """Python's are sent exactly, and may be an array on one rank and a number on another."""
    given = {"w": jnp.ones(2), "lr": 0.1 + rank, "n": 2**40 + rank, "count": jnp.asarray(3) if rank == 0 else 0}
    got = mpi_util.rank0_bcast_wts(given, comm=comm)
    assert (got["lr"], got["n"], int(got["count"])) == (0.1, 2**40, 3) and type(got["lr"]) is float


def check_containers_of_other_arrays(comm, rank, size):
    read_only = np.full(2, rank)
    read_only.setflags(write=False)  # as a checkpoint gives them
    for array in (np.full(2, rank), read_only):
        got = mpi_util.rank0_bcast_wts(flax.core.freeze({"w": array}), comm=comm)
        assert isinstance(got, flax.core.FrozenDict) and got["w"].tolist() == [0, 0]


def check_collect(comm, rank, size):
    """What `play` gives is kept while the next episode runs."""
    got = mpi_util.collect(lambda seed: {"x": jnp.full((2, 3), seed), "y": np.ones(2)}, episodes=4, seed=1, comm=comm)
    if rank == 0:
        assert isinstance(got["x"], jax.Array) and got["x"].shape == (8, 3) and len({*got["x"][:, 0].tolist()}) == 4


def check_devices(comm, rank, size):
    """What is committed to no device stays so: a jitted function is compiled once, and may spread it over devices."""
    got = mpi_util.rank0_bcast_wts({"w": jnp.full(2, float(rank)), "x": jnp.full(2, rank)}, comm=comm)
    total = mpi_util.all_sum({"w": jnp.ones(2), "none": None, "state": optax.EmptyState()}, comm=comm)
    assert not any(x.committed for x in (*got.values(), total["w"]))
    assert total["none"] is None and total["state"] == optax.EmptyState() and type(total["state"]) is optax.EmptyState
    there = jax.device_put(jnp.ones(2), jax.devices("cpu")[1])
    assert mpi_util.rank0_bcast_wts({"w": there}, comm=comm)["w"].device == jax.devices("cpu")[1]


def check_train_state(comm, rank, size):
    def step(state):
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))

    params = flax.core.freeze({"w": jnp.full(2, float(rank))})
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    before = mpi_util.weights_version
    state = mpi_util.rank0_bcast_wts(state, comm=comm)
    assert comm or mpi_util.weights_version == before + 1
    for _ in range(2):
        if rank == 0:
            state = jax.jit(step)(state)  # its counter becomes an array; the others' is a number
        state = mpi_util.rank0_bcast_wts(state, comm=comm)
    assert state.step == 2 and isinstance(state.params, flax.core.FrozenDict)
    digests = mpi_util.rank0_gather(mpi_util.chksum(state), comm=comm)
    assert len({*digests}) == 1 and abs(float(state.params["w"][0]) + 0.2) < 1e-4


def net(seed):
    rngs, shared = nnx.Rngs(seed), nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
    return nnx.Sequential(shared, nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), shared)


def check_nnx(comm, rank, size):
    model = net(rank)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    model(jnp.full((4, 3), float(rank)))  # statistics, and the counter of the dropout's rngs
    weights = model.layers[0].kernel
    assert mpi_util.rank0_bcast_wts(model, comm=comm) is model and model.layers[0].kernel is weights
    assert model.layers[3] is model.layers[0]
    both = [model, optimizer]
    assert mpi_util.rank0_bcast_wts(both, comm=comm) is both and both[0] is model
    mpi_util.collect(lambda: {"x": np.ones(1)}, episodes=1, seed=0, weights=both, comm=comm)
    reference = net(0)
    reference(jnp.zeros((4, 3)))
    assert mpi_util.chksum(model) == mpi_util.chksum(reference)
    model.eval(), reference.eval()
    assert np.array_equal(model(jnp.ones((1, 3))), reference(jnp.ones((1, 3))))


def check_modes_of_nnx(comm, rank, size):
    """They are sent, as torch's, and so are arrays that are no variables."""
    model = net(rank)
    model.attention = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(rank))  # its mode is None
    model.large = jnp.full(5000, float(rank))
    if rank == 0:
        model.eval()
    for mode in (True, False):
        mpi_util.rank0_bcast_wts([model, {"eps": 0.1 * rank}], comm=comm)
        assert model.layers[2].deterministic == model.attention.deterministic == model.layers[1].use_running_average
        assert model.attention.deterministic is mode and model.large[0] == 0
        model.train()
    other = net(rank)
    other.layers[2].deterministic = None if rank == 0 else True
    mpi_util.rank0_bcast_wts(other, comm=comm)
    assert other.layers[2].deterministic is None and other.layers[1].use_running_average is False


def check_modules_in_what_an_object_holds(comm, rank, size):
    """Beside arrays, in a frozen container, in one object within another."""
    agent, inner = type("Agent", (), {})(), type("Inner", (), {})()
    agent.nets = {"actor": net(rank), "temperature": jnp.float32(rank)}
    agent.frozen = flax.core.freeze({"critic": net(rank)})
    inner.params = {"w": jnp.full(2, rank)}
    agent.held = {"w": jnp.full(1, rank), "inner": inner}
    mpi_util.rank0_bcast_wts(agent, comm=comm)
    reference = mpi_util.chksum(net(0))
    assert mpi_util.chksum(agent.nets["actor"]) == mpi_util.chksum(agent.frozen["critic"]) == reference
    assert agent.nets["temperature"] == 0 and inner.params["w"].tolist() == [0, 0]


class Policy:
    """A plain object with a tree, that can be called."""

    def __init__(self, rank):
        self.params = {"w": jnp.full(2, rank)}

    def __call__(self, x):
        return x @ self.params["w"]


def check_objects_in_an_object_or_a_tree(comm, rank, size):
    agent, actor, scale = (type("Thing", (), {})() for _ in range(3))
    agent.critic, agent.target, agent.actor, agent.scale = net(rank), Policy(rank), actor, scale
    actor.net, actor.name, scale.mean, scale.var = net(rank), "actor", jnp.full(2, rank), jnp.ones(2)
    mpi_util.collect(lambda: {"x": np.ones(1)}, episodes=1, seed=0, weights=agent, comm=comm)
    assert mpi_util.chksum(agent.actor.net) == mpi_util.chksum(agent.critic) == mpi_util.chksum(net(0))
    assert agent.target.params["w"].tolist() == agent.scale.mean.tolist() == [0, 0]
    got = mpi_util.rank0_bcast_wts({"policy": Policy(rank), "w": jnp.full(2, rank)}, comm=comm)
    assert got["policy"].params["w"].tolist() == got["w"].tolist() == [0, 0]


def check_numbers_beside_a_module(comm, rank, size):
    """In place as with torch's modules, and those within the module are reported."""
    settings, model = {"eps": 0.1 * rank}, net(rank)
    mpi_util.collect(lambda: {"x": np.ones(1)}, episodes=1, seed=0, weights=[model, settings], comm=comm)
    assert settings == {"eps": 0} and mpi_util.chksum(model) == mpi_util.chksum(net(0))
    model.epsilon = model.layers[2].deterministic = 0.1 + rank  # no mode: a number
    with contextlib.redirect_stderr(io.StringIO()) as err:
        mpi_util.rank0_bcast_wts(model, comm=comm)
    assert model.epsilon == model.layers[2].deterministic == 0.1 + rank
    assert comm or rank or size == 1 or "'layers.2.deterministic, epsilon' of the model" in err.getvalue(), (
        err.getvalue()
    )


def check_weak_types(comm, rank, size):
    """They decide the dtype of a product, so they do not depend on the number of ranks."""
    rms = type("Rms", (), {})()
    rms.mean, rms.var, rms.count = jnp.full(2, float(rank)), jnp.ones(2), jnp.asarray(2.0)
    mpi_util.merge_moments(rms, comm=comm)
    weak = {"w": jnp.full(2, float(rank)), "n": jnp.asarray(1)}
    kept = [mpi_util.all_sum(weak, comm=comm), mpi_util.all_mean(weak, comm=comm), mpi_util.bcast(weak, comm=comm)]
    assert rms.mean.weak_type and all(tree["w"].weak_type for tree in kept)
    assert not mpi_util.all_accum_batches(weak, comm=comm)["w"].weak_type
    assert float(mpi_util.all_mean({"n": jnp.asarray(rank)}, comm=comm)["n"]) == (size - 1) / 2


def check_leaves_that_stay(comm, rank, size):
    """What is neither an array nor a model stays each rank's own; linen's modules have no weights of their own."""
    config, linen = types.SimpleNamespace(name="x"), flax.linen.Dense(1)
    mine = {"w": jnp.full(2, rank), "dtype": np.dtype("f4"), "path": pathlib.Path(str(rank)), "set": {rank}}
    mine |= {"linen": linen, "config": config, "function": jax.nn.relu}
    got = mpi_util.rank0_bcast_wts(mine, comm=comm)
    assert got["w"].tolist() == [0, 0] and got["set"] == {rank} and got["path"].name == str(rank)
    assert got["linen"] is linen and got["config"] is config and got["function"] is jax.nn.relu
    agent = type("Agent", (), {})()
    agent.network = flax.linen.Dense(1)
    agent.params = {"w": jnp.full(2, rank)}
    mpi_util.rank0_bcast_wts(agent, comm=comm)
    assert agent.params["w"].tolist() == [0, 0]


def check_wide_numbers_outside_of_x64(comm, rank, size):
    """float64 that was made under `enable_x64` keeps its bits."""
    with jax.enable_x64(True):
        wide = jnp.full(2, 1 / 3 + rank)
    for got in (mpi_util.rank0_bcast_wts({"w": wide}, comm=comm), mpi_util.all_accum_batches({"w": wide}, comm=comm)):
        assert got["w"].dtype == "float64" and float(got["w"][0]) == 1 / 3


def check_objects(comm, rank, size):
    params = flax.core.freeze({"w": jnp.full(2, float(rank))})
    agent = type("Agent", (), {})()
    agent.params, agent.opt = params, optax.adam(0.1).init(params)
    agent.scale = np.full(2, rank)
    assert mpi_util.rank0_bcast_wts(agent, comm=comm) is agent
    assert agent.params["w"].tolist() == [0, 0] and agent.scale.tolist() == [0, 0]
    assert type(agent.opt) is tuple and mpi_util.chksum(agent.opt)


def check_a_dropped_result_is_told_once(comm, rank, size):
    from mpi_util.ranks.console import _Printed
    from mpi_util.ranks.state import state

    def told(call) -> str:
        state(_Printed).clear()
        with contextlib.redirect_stderr(io.StringIO()) as err:
            call()
        return err.getvalue()

    mine, same, module = {"w": jnp.full(2, rank)}, {"w": jnp.ones(2)}, nnx.Linear(1, 1, rngs=nnx.Rngs(rank))

    def dropped():
        for _ in range(3):
            mpi_util.rank0_bcast_wts(mine, comm=comm)

    def dropped_on_several_lines():
        mpi_util.rank0_bcast_wts(
            mine,  # a comment
            comm=comm,
        )

    def dropped_by_another_name():
        send = partial(mpi_util.rank0_bcast_wts, comm=comm)
        [send(mine) for _ in range(2)] and send(mine)
        send(mine)

    def named_as_dropped():
        _ = mpi_util.rank0_bcast_wts(mine, comm=comm)

    def sent(params):
        return mpi_util.rank0_bcast_wts(params, comm=comm)

    def dropped_by_the_caller():
        sent(mine)

    def averaged():
        mpi_util.all_avg_wts(mine, comm=comm)

    def played(params):
        params = mpi_util.rank0_bcast_wts(params, comm=comm)
        return params["w"].tolist()

    def used():
        first = mpi_util.rank0_bcast_wts(mine, comm=comm)  # the template stays
        played(sent(mine))
        played(mine)
        print(
            mpi_util.rank0_bcast_wts(mine, comm=comm), file=io.StringIO()
        )  # fmt: skip
        return [mpi_util.rank0_bcast_wts(mine, comm=comm)], first

    def as_they_were():
        mpi_util.rank0_bcast_wts(same, comm=comm)
        mpi_util.rank0_bcast_wts(module, comm=comm)
        mpi_util.rank0_bcast_wts([module, np.full(1, rank)], comm=comm)
        mpi_util.rank0_bcast_wts([nnx.Linear(1, 1, rngs=nnx.Rngs(rank)), jnp.ones(1)], comm=comm)

    wrong = (dropped, dropped_on_several_lines, dropped_by_another_name, named_as_dropped, dropped_by_the_caller)
    wrong += (averaged,)
    if rank == 1:
        assert all(told(call).count("\n") == 1 for call in wrong)
        assert "params = mpi_util.rank0_bcast_wts(params)" in told(dropped)
    else:
        assert "".join(map(told, [*wrong, dropped])) == ""
    assert told(used) + told(as_they_were) == ""


def check_gather(comm, rank, size):
    batch = {name: jnp.full((rank + 1, 2), rank, name) for name in DTYPES}
    batch |= {"key": jax.random.split(jax.random.key(rank), 2), "one key": jax.random.key(rank, impl="rbg")}
    batch |= {"large": jnp.full((30_000, 2), float(rank)), "one": jnp.float32(rank)}
    for call in (mpi_util.rank0_accum_batches, mpi_util.all_accum_batches):
        got = call(batch, comm=comm)
        if rank and call is mpi_util.rank0_accum_batches:
            assert got is batch
            continue
        assert all(isinstance(leaf, jax.Array) for leaf in got.values())
        for name in DTYPES:
            assert got[name].dtype == name and got[name].shape == (size * (size + 1) // 2, 2)
            assert np.array_equal(got[name], np.concatenate([jnp.full((k + 1, 2), k, name) for k in range(size)]))
        keys = jnp.concatenate([jax.random.split(jax.random.key(k), 2) for k in range(size)])
        assert jnp.array_equal(jax.random.key_data(got["key"]), jax.random.key_data(keys))
        assert jax.random.key_impl(got["one key"]) == "rbg" and got["one key"].shape == (size,)
        assert got["one"].tolist() == list(range(size))
    kept = mpi_util.rank0_accum_batches(batch, comm=comm)["large"]
    for other in range(5):  # kept, while the memory of others is used again
        mpi_util.rank0_accum_batches({"large": jnp.full((30_000, 2), other + 7.0)}, comm=comm)
    assert rank or np.array_equal(np.unique(kept), np.arange(size))
    listed = mpi_util.rank0_gather((jax.random.key(rank), jnp.full(2, rank, jnp.bfloat16)), comm=comm)
    if rank == 0:
        assert [int(x[0]) for _, x in listed] == list(range(size)) and listed[-1][1].dtype == jnp.bfloat16
    got = mpi_util.bcast({"key": jax.random.key(rank), "x": jnp.full(2, rank)}, comm=comm)
    assert got["x"].tolist() == [0, 0] and jnp.array_equal(jax.random.key_data(got["key"]), [0, 0])


@flax.struct.dataclass
class Transition:
    obs: jax.Array
    act: jax.Array
    extra: dict
    name: str = flax.struct.field(pytree_node=False)


def check_containers_that_jax_knows(comm, rank, size):
    rows = Transition(jnp.full((rank, 2), rank), jnp.full(rank, rank, jnp.bfloat16), {"z": jnp.ones(1)}, f"rank {rank}")
    for batch, inside in ((rows, lambda x: x), ({"t": (rows, 1.5)}, lambda x: x["t"][0])):
        got = inside(mpi_util.all_accum_batches(batch, comm=comm))
        assert isinstance(got, Transition) and got.obs[:, 0].tolist() == [k for k in range(size) for _ in range(k)]
        assert got.act.dtype == jnp.bfloat16 and got.extra["z"].shape == (size,) and got.name == f"rank {rank}"
    frozen = flax.core.freeze({"w": jnp.full(2, float(rank)), "n": 1})
    for call, w in ((mpi_util.all_sum, size * (size - 1) / 2), (mpi_util.all_mean, (size - 1) / 2)):
        got = call(frozen, comm=comm)
        assert isinstance(got, flax.core.FrozenDict) and got["w"].tolist() == [w, w]
        assert got["n"] == (size if call is mpi_util.all_sum else 1)
        pair = call(Pair(frozen["w"], [frozen["w"]]), comm=comm)
        assert isinstance(pair, Pair) and pair.right[0].tolist() == [w, w]
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(rank))
    model.bias[...] = jnp.full(1, float(rank))
    gradient = mpi_util.all_mean(nnx.grad(lambda m: (m.bias[...] ** 2).sum())(model), comm=comm)
    assert isinstance(gradient, nnx.State) and gradient["bias"][...].tolist() == [size - 1]
    nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param).update(model, gradient)
    state = TrainState.create(apply_fn=None, params=frozen, tx=optax.sgd(0.1))
    mean = mpi_util.all_mean(state, comm=comm)
    assert isinstance(mean, TrainState) and mean.params["w"].tolist() == [(size - 1) / 2] * 2
    if comm is None or size > 1:
        listed = mpi_util.rank0_gather(rows, comm=comm)
        assert rank or [one.name for one in listed] == [f"rank {k}" for k in range(size)]


def check_sums(comm, rank, size):
    got = mpi_util.all_sum({"x": jnp.full((2,), rank + 1), "half": jnp.full(1, 1, jnp.bfloat16)}, comm=comm)
    assert got["x"].tolist() == [size * (size + 1) // 2] * 2 and got["half"].dtype == jnp.bfloat16
    mean = mpi_util.all_mean(jnp.full(2, float(rank)), comm=comm)
    assert isinstance(mean, jax.Array) and mean.tolist() == [(size - 1) / 2] * 2
    rms = type("Rms", (), {})()
    rms.mean, rms.var, rms.count = jnp.full(2, float(rank)), jnp.ones(2), jnp.float32(2)
    mpi_util.merge_moments(rms, comm=comm)
    assert isinstance(rms.mean, jax.Array) and (size == 1 or abs(float(rms.mean[0]) - (size - 1) / 2) < 1e-6)


def check_bad_input(comm, rank, size):
    def traced(call):
        return lambda: jax.jit(lambda x: (call(x), x)[1])(jnp.ones(2))

    raises(mpi_util.WeightsError, "outside of jax.jit", traced(lambda x: mpi_util.rank0_bcast_wts({"w": x}, comm=comm)))
    raises(mpi_util.BatchError, "outside of jax.jit", traced(lambda x: mpi_util.all_mean({"w": x}, comm=comm)))
    raises(mpi_util.BatchError, "outside of jax.jit", traced(lambda x: mpi_util.rank0_accum_batches(x, comm=comm)))
    gone = jnp.ones(2)
    gone.delete()
    raises(mpi_util.WeightsError, "'w' is a deleted", lambda: mpi_util.rank0_bcast_wts({"w": gone}, comm=comm))
    raises(mpi_util.BatchError, "'w' is a deleted", lambda: mpi_util.rank0_accum_batches({"w": gone}, comm=comm))
    donated = jnp.ones(2)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    raises(mpi_util.WeightsError, "give what that returned", lambda: mpi_util.rank0_bcast_wts([donated], comm=comm))
    devices = jax.sharding.Mesh(np.array(jax.devices("cpu")), "x")
    on_two = jax.device_put(jnp.ones(2), jax.NamedSharding(devices, jax.P("x")))
    for kind, call in (
        (mpi_util.WeightsError, mpi_util.rank0_bcast_wts),
        (mpi_util.WeightsError, mpi_util.all_avg_wts),
        (mpi_util.BatchError, mpi_util.rank0_accum_batches),
        (mpi_util.BatchError, mpi_util.all_sum),
    ):
        raises(kind, "'w' lies on several devices; give jax.device_put", partial(call, {"w": on_two}, comm=comm))
    raises(mpi_util.BatchError, "'k'", lambda: mpi_util.all_sum({"k": jax.random.key(0)}, comm=comm))
    last = rank == size - 1
    one_more = {"w": jnp.ones(2)} | ({"b": jnp.ones(1)} if last else {})
    with jax.enable_x64(last):
        wide, number = {"w": jnp.ones(2, float)}, {"w": jnp.asarray(np.float64(1))}
    alone = size == 1
    alone or raises(mpi_util.BatchError, "deleted", lambda: mpi_util.bcast(gone, comm=comm))
    for model, text in ((one_more, "'b' is not the same"), (wide, "float64 (2,)"), (number, "'w of 64 bits'")):
        for call in (mpi_util.rank0_bcast_wts, mpi_util.all_avg_wts):
            assert not alone or call(model, comm=comm)
            alone or raises(mpi_util.RankMismatchError, text, partial(call, model, comm=comm))
    raises(
        mpi_util.WeightsError,
        "call rank0_bcast_wts before",
        lambda: mpi_util.collect(
            lambda *_: {"x": np.ones(1)}, episodes=1, seed=0, weights={"w": jnp.ones(2)}, comm=comm
        ),
    )


run_checks(globals())
