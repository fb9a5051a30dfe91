"""Broadcasts, averages and checksums of weights; sums, means and copies."""

import dataclasses
import importlib.util
from collections import OrderedDict

import numpy as np
import torch
from harness import fork, raises, run_checks

import mpi_util

fork()
torch.set_num_threads(1)


def model(seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    )
    net[3].weight = net[2].weight  # tied
    net.register_buffer("none", torch.zeros(0, 3))
    net.register_buffer("scalar", torch.tensor(seed, dtype=torch.int64))
    net.half_part = torch.nn.Parameter(torch.randn(3).to(torch.bfloat16))
    net.transposed = torch.nn.Parameter(torch.randn(3, 2).T)  # not contiguous
    net[1](torch.randn(8, 4))  # running statistics
    return net


def check_torch_module(comm, rank, size):
    net, reference = model(rank), model(0)
    places = [p.data_ptr() for p in net.parameters()]
    assert mpi_util.rank0_bcast_wts(net, comm=comm) is net
    assert mpi_util.chksum(net) == mpi_util.chksum(reference)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), reference.state_dict().values()))
    assert places == [p.data_ptr() for p in net.parameters()]  # in place
    assert net[3].weight is net[2].weight


def check_torch_optimizer(comm, rank, size):
    def stepped(seed):
        net = torch.nn.Linear(3, 2)
        adam = torch.optim.Adam(net.parameters())
        net(torch.full((1, 3), float(seed))).sum().backward()
        adam.step()
        return adam

    adam = stepped(rank + 1)
    mpi_util.rank0_bcast_wts(adam, comm=comm)
    expected = stepped(1).state_dict()["state"]
    assert all(torch.equal(v, expected[i][k]) for i, s in adam.state_dict()["state"].items() for k, v in s.items())


def check_arrays(comm, rank, size):
    def weights(k):
        return {"w": np.full((3, 4), k, "f4"), "deep": [np.array(k), (np.asfortranarray(np.full((2, 3), k + 0.5)),)]}

    mine = weights(rank)
    arrays = [mine["w"], mine["deep"][0], mine["deep"][1][0]]
    mpi_util.rank0_bcast_wts(mine, comm=comm)
    assert mpi_util.chksum(mine) == mpi_util.chksum(weights(0))
    assert all(a is b for a, b in zip(arrays, [mine["w"], mine["deep"][0], mine["deep"][1][0]]))
    big = np.full(300_000, rank, "f8")
    mpi_util.rank0_bcast_wts([big], comm=comm)
    assert (big == 0).all()


def check_models_in_a_dict(comm, rank, size):
    mine = {"pi": model(rank), "vf": torch.nn.Linear(2, rank + 1 - rank), "std": np.full(2, rank)}
    mpi_util.rank0_bcast_wts(mine, comm=comm)
    assert mpi_util.chksum(mine["pi"]) == mpi_util.chksum(model(0)) and (mine["std"] == 0).all()


def check_whatever_holds_weights(comm, rank, size):
    class Mine(dict):
        pass

    net, table = model(rank), OrderedDict(b=np.full(3, rank), a=np.full(2, rank))
    for kind in (net.state_dict(), table, Mine(table), np.full(4, rank), torch.full((2,), rank), net.scalar):
        for call in (mpi_util.rank0_bcast_wts, mpi_util.all_avg_wts):
            for _ in range(2):
                call(kind, comm=comm)
        sums = mpi_util.rank0_gather([mpi_util.chksum(kind), mpi_util.chksum(kind)], comm=comm)
        assert rank or len({digits for pair in sums for digits in pair}) == 1
    assert mpi_util.chksum(net.state_dict()) == mpi_util.chksum(model(0).state_dict())


class Filter:
    """A normaliser whose arrays are replaced, with one in it; and what is not sent."""

    def __init__(self, k, inner=True):
        self.mean, self.n, self.frozen, self.clip = np.full(3, float(k)), k, k == 0, np.float32(k)
        self.shape, self.kind = (k,), "running"
        if inner:
            self.inner = Filter(k, False)

    def values(self):
        own = (self.mean.tolist(), self.n, self.frozen, self.clip)
        return [(x, type(x)) for x in own] + (self.inner.values() if hasattr(self, "inner") else [])


def check_numbers_and_objects(comm, rank, size):
    found, other = Filter(rank), Filter(0)
    mine = [model(rank), found, {"epsilon": rank / 4, "rest": [rank, rank > 0, 1j * rank]}]
    mpi_util.rank0_bcast_wts(mine, comm=comm)
    assert found.values() == other.values() and found.shape == (rank,)
    assert repr(mine[2]) == repr({"epsilon": 0.0, "rest": [0, False, 0j]})
    assert mpi_util.chksum(mine) == mpi_util.chksum([model(0), other, {"epsilon": 0.0, "rest": [0, False, 0j]}])
    found.mean, found.n = np.full(3, rank + 1.0), 7 + rank  # replaced, not written into
    mpi_util.rank0_bcast_wts(found, comm=comm)
    assert (found.mean == 1).all() and found.n == 7 and type(found.n) is int
    table, found.mean = {"step": rank, "rate": float(rank)}, np.full(3, float(rank))
    mpi_util.all_avg_wts([table, found], comm=comm)
    assert table == {"step": 0, "rate": (size - 1) / 2} and (found.mean == (size - 1) / 2).all()


class Environment:
    def __init__(self, k):
        self.state, self.t = np.full(2, k), k

    def reset(self):
        pass

    def step(self, action):
        pass


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def check_what_an_object_holds_for_itself_stays(comm, rank, size):
    def others(k):
        config = Holder(seed=k, name="Hopper")
        buffer = Holder(rng=np.random.default_rng(k), rows=np.full(3, k), net=model(k))
        return {
            "env": Environment(k),
            "config": config,
            "returns": [k, k],
            "layers": [np.full(2, k)],
            "rates": {"actor": k},
            "buffer": buffer,
            "log": print,
            "none": None,
        }

    net, parts = model(rank), others(rank)
    agent = Holder(epsilon=rank / 2, net=net, optimizer=torch.optim.Adam(net.parameters()), **parts)
    parts["buffer"].agent = agent
    agent.scales = {"w": torch.full((2,), rank), "scale": rank}
    mpi_util.rank0_bcast_wts(agent, comm=comm)
    assert agent.epsilon == 0 and mpi_util.chksum(net) == mpi_util.chksum(model(0))
    assert not agent.scales["w"].any() and agent.scales["scale"] == 0
    assert not agent.layers[0].any() and agent.rates["actor"] == 0
    assert mpi_util.chksum(agent.buffer.net) == mpi_util.chksum(model(0))  # weights are sent wherever they are
    assert (agent.env.state == rank).all() and (agent.env.t, agent.config.seed) == (rank, rank)
    assert agent.returns == [rank, rank] and (agent.buffer.rows == rank).all()


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float = 0.5


def check_numbers_that_cannot_be_replaced_are_refused(comm, rank, size):
    for thing, text in [
        ({"clip": (0.1, 0.2)}, "'clip/0' is a float, not written in place"),
        ([Frozen()], "'0' is a Frozen, not written in place"),
        (Frozen(), "no weights found in a Frozen"),
        (Environment(0), "no weights found in a Environment"),
        (Holder(name="x", rng=np.random.default_rng()), "no weights found in a Holder"),
        ({"n": 2**63}, "'n' is an int beyond 64 bits"),
        ({"name": "x"}, "'name' is a str, not written in place"),
    ]:
        raises(mpi_util.WeightsError, text, lambda thing=thing: mpi_util.rank0_bcast_wts(thing, comm=comm))
    if size > 1:
        text = "'n' is not the same on all ranks"
        mine = {"n": 1 if rank else 1.0}
        raises(mpi_util.RankMismatchError, text, lambda: mpi_util.rank0_bcast_wts(mine, comm=comm))


def check_average(comm, rank, size):
    mine = {"w": np.full((300, 4), float(rank), "f4"), "steps": np.array(rank)}
    mpi_util.all_avg_wts(mine, comm=comm)
    scalar = torch.nn.Parameter(torch.tensor(float(rank)))
    mpi_util.all_avg_wts({"log_alpha": scalar}, comm=comm)
    assert scalar.item() == (size - 1) / 2
    assert (mine["w"] == np.float32((size - 1) / 2)).all() and mine["steps"] == 0


def check_models_that_differ(comm, rank, size):
    last = rank == size - 1
    mine = {"same": np.zeros(2), "w": np.zeros((2, 3 + last)), **({"more": np.zeros(1)} if last else {})}
    if size > 1:
        raises(mpi_util.RankMismatchError, "'more'", lambda: mpi_util.rank0_bcast_wts(mine, comm=comm))
        del mine["more" if last else "same"]
        raises(mpi_util.RankMismatchError, "rank 0: ", lambda: mpi_util.rank0_bcast_wts(mine, comm=comm))
    changed = {"a": np.full(3, float(rank))}
    for _ in range(2):  # a model may change between calls, if it changes alike everywhere
        mpi_util.rank0_bcast_wts(changed, comm=comm)
        changed["b"] = np.full(2, rank)
    raises(mpi_util.WeightsError, "written in place", lambda: mpi_util.chksum({"w": (3.0,)}))


def check_reductions(comm, rank, size):
    for shape in [(), (3,), (100, 70)]:
        for dtype in ["i4", "f4", "f8", "c16"]:
            x = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + rank).astype(dtype)
            total = mpi_util.all_sum(x, comm=comm)
            assert total.dtype == x.dtype and total.shape == x.shape
            expected = sum((np.arange(np.prod(shape, dtype=int)).reshape(shape) + k).astype(dtype) for k in range(size))
            assert np.array_equal(total, expected)
            mean = mpi_util.all_mean(x, comm=comm)
            assert np.allclose(mean, expected / size) and mean.dtype == ("f8" if dtype == "i4" else dtype)
    assert mpi_util.all_sum(rank, comm=comm) == sum(range(size))
    if size > 1:
        for odd in (rank == size - 1, rank > 0):
            mpi_util.all_sum(np.ones(3), comm=comm)
            mixed = 1 if odd else np.ones(3)
            raises(mpi_util.RankMismatchError, "rank 0: float64 (3,)", lambda x=mixed: mpi_util.all_sum(x, comm=comm))
    x = torch.full((2,), float(rank))
    assert torch.equal(mpi_util.all_sum(x, comm=comm), torch.full((2,), float(sum(range(size)))))
    if size > 1:
        raises(
            mpi_util.RankMismatchError, "rank 1: float64 (2,)", lambda: mpi_util.all_sum(np.zeros(1 + rank), comm=comm)
        )
        number_or_array = 1.0 if rank == 0 else np.ones(3)
        raises(mpi_util.RankMismatchError, "rank 0: float64 ()", lambda: mpi_util.all_sum(number_or_array, comm=comm))


def check_sums_of_what_is_hard_to_sum(comm, rank, size):
    assert mpi_util.all_sum(True, comm=comm) == size
    for twice in ({"a/b": 1.0, "a": {"b": 2.0}}, {1: 1.0, "1": 2.0}, {"": 1.0, "x": 2.0}):
        raises(mpi_util.BatchError, "two leaves are both named", lambda x=twice: mpi_util.all_sum(x, comm=comm))
    assert mpi_util.all_mean(np.array([True, rank == 0]), comm=comm).tolist() == [1.0, 1 / size]
    assert mpi_util.all_mean(np.uint8(200), comm=comm) == 200
    assert mpi_util.all_mean(np.float16(60000), comm=comm) == np.float16(60000)
    assert mpi_util.all_mean(np.full(700, 3, ">f8"), comm=comm)[0] == 3
    assert mpi_util.all_mean(torch.tensor(1.5), comm=comm) == torch.tensor(1.5)
    bf16 = mpi_util.all_mean(torch.full((2,), float(rank)).bfloat16(), comm=comm)
    assert bf16.dtype == torch.bfloat16 and bf16.tolist() == [torch.tensor((size - 1) / 2).bfloat16()] * 2
    module = torch.nn.Linear(2, 2).bfloat16()
    torch.nn.init.constant_(module.weight, float(rank))
    mpi_util.all_avg_wts(module, comm=comm)
    assert (module.weight == torch.tensor((size - 1) / 2).bfloat16()).all()


def check_an_error_of_one_rank_leaves_nobody_behind(comm, rank, size):
    raises(
        mpi_util.WeightsError,
        "written in place",
        lambda: mpi_util.rank0_bcast_wts({"w": None if rank == size - 1 else np.zeros(1)}, comm=comm),
    )
    if size > 1:
        raises(Exception, "pickle", lambda: mpi_util.bcast((lambda: 0) if rank == 0 else None, comm=comm))
    assert mpi_util.all_sum(1, comm=comm) == size


def check_bcast(comm, rank, size):
    assert mpi_util.bcast({"from": rank}, comm=comm) == {"from": 0}
    assert mpi_util.bcast(np.array([{"from": rank}], object), comm=comm)[0] == {"from": 0}
    for x in (np.full((2, 3), rank), np.full(100_000, rank, "f4"), np.zeros((0, 2)) + rank):
        assert mpi_util.bcast(x, comm=comm) is x and (x == 0).all()
    view = mpi_util.bcast(torch.zeros(10**6)[:1], comm=comm)  # which travels without what lies beside it
    assert view.shape == (1,) and (rank == 0 or view.untyped_storage().nbytes() == 4)
    masked = np.ma.array([1, 2], mask=[rank == 0, False])
    assert mpi_util.bcast(masked, comm=comm).mask.tolist() == [True, False]
    fixed = np.arange(2)
    fixed.flags.writeable = False
    if size > 1:
        raises(mpi_util.BatchError, "this one is read-only", lambda: mpi_util.bcast(fixed, comm=comm))


def check_sender_is_only_read(comm, rank, size):
    mine = {"w": np.arange(5.0) + rank}
    if rank == 0:
        before = mine["w"].tobytes()
        mpi_util.rank0_bcast_wts(mine, comm=comm)
        assert mine["w"].tobytes() == before
    else:
        mpi_util.rank0_bcast_wts(mine, comm=comm)


def check_bits_of_one_dtype_are_not_those_of_another(comm, rank, size):
    kinds = torch.bfloat16, torch.uint16
    mine = torch.ones(3).to(kinds[rank > 0])
    if size > 1:
        text = "rank 0: bfloat16 (3,) (of 1 arrays)\n  rank 1: uint16 (3,) (of 1 arrays)"
        raises(mpi_util.RankMismatchError, text, lambda: mpi_util.rank0_bcast_wts([mine], comm=comm))
        text = "is bfloat16 (*,) on rank 0 and uint16 (*,) on rank 1"
        raises(mpi_util.RankMismatchError, text, lambda: mpi_util.rank0_accum_batches({"x": mine}, comm=comm))


def check_dtypes_that_extend_numpy(comm, rank, size):
    if not importlib.util.find_spec("ml_dtypes"):
        return  # it comes with TensorFlow
    import ml_dtypes

    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        x = np.full(2, rank, dtype)
        found = mpi_util.rank0_accum_batches({"x": x}, comm=comm)["x"]
        assert found.dtype == dtype and (rank or found[::2].tolist() == list(range(size)))
        total = mpi_util.all_sum(x, comm=comm)
        assert total.dtype == dtype and total.tolist() == [sum(range(size))] * 2
        mpi_util.all_avg_wts([x], comm=comm)
        assert x.tolist() == [np.asarray((size - 1) / 2, dtype)] * 2
        mpi_util.rank0_bcast_wts([y := np.full(2, rank + 1, dtype)], comm=comm)
        assert y.tolist() == [1.0, 1.0]


def check_scripted_modules(comm, rank, size):
    torch.manual_seed(rank)
    net = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3))
    for model in (net, torch.nn.Sequential(net), KeepsNames()):
        for _ in range(3):
            mpi_util.rank0_bcast_wts(model, comm=comm)
            assert len(set(mpi_util.all_accum_batches([mpi_util.chksum(model)], comm=comm))) == 1


class KeepsNames(torch.nn.Module):
    """Its state dict is written by itself, and holds no weights but those of its parts."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}version"] = torch.tensor(3)


def check_weights_that_cannot_be_sent_are_refused(comm, rank, size):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(net.parameters())

    def loss():
        optimizer.zero_grad()
        (found := net(torch.ones(4, 3)).square().mean()).backward()
        return found

    optimizer.step(loss)
    quantized = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    expanded = torch.nn.Linear(3, 2)
    expanded.register_buffer("scale", torch.ones(1).expand(4))
    cases = [(optimizer, "is a list of tensors"), (quantized, "(LinearPackedParams) keeps its weights elsewhere")]
    cases += [(expanded, "'scale' cannot be written in place: its elements share memory")]
    cases += [(torch.nn.LazyLinear(2), "'weight' is a UninitializedParameter that cannot be sent")]
    cases += [
        (torch.nn.Linear(3, 2, device="meta"), "it has no memory"),
        ([torch.eye(2).to_sparse()], "cannot be sent"),
    ]
    for thing, text in cases:
        raises(mpi_util.WeightsError, text, lambda thing=thing: mpi_util.rank0_bcast_wts(thing, comm=comm))
    for thing in (torch.eye(2).to_sparse(), torch.nn.Linear(1, 1)):
        raises(
            mpi_util.BatchError,
            "of which no array can be made",
            lambda thing=thing: mpi_util.rank0_accum_batches({"x": thing}, comm=comm),
        )
    raises(mpi_util.BatchError, "of which no array", lambda: mpi_util.all_sum(torch.eye(2).to_sparse(), comm=comm))
    raises(mpi_util.BatchError, "a whole number", lambda: mpi_util.rank0_accum_batches([{}], index=[0.5], comm=comm))


def check_gathered_tensors_stay_tensors(comm, rank, size):
    batch = {"x": torch.full((2, 3), float(rank)), "b": torch.ones(1, dtype=torch.bfloat16) * rank}
    got = mpi_util.rank0_accum_batches(batch, comm=comm)
    if rank == 0:
        assert torch.equal(got["x"], torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3))
        assert got["b"].dtype == torch.bfloat16 and got["b"].tolist() == [float(k) for k in range(size)]


run_checks(globals())
