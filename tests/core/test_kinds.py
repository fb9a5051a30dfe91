"""Kinds of objects that programs give the collective calls: what is rows is joined, all else refused by name."""

import sys

import pytest
from conftest import mpi_environment, run

from mpi_util.arrays.adapters import slots
from mpi_util.collectives import pickles

HEAD = """
import collections, io, sys
import numpy as np
import mpi_util
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
r = mpi_util.rank
"""
MAPPINGS = """
class AttrDict(dict):
    __getattr__ = dict.__getitem__

np.savez(file := io.BytesIO(), obs=np.full((2, 3), r), act=np.arange(2) + r)
file.seek(0)
for batch in (np.load(file), collections.UserDict(obs=np.full((2, 3), r), act=np.arange(2) + r),
              AttrDict(obs=np.full((2, 3), r), act=np.arange(2) + r)):
    got = mpi_util.rank0_accum_batches(batch)
    if r == 0:
        print(type(got).__name__, sorted(got), got["obs"][:, 0].tolist(), got["act"].tolist())
sums = mpi_util.all_sum({"a": 1, "b": (np.full(2, r), [1.0, 2.0])})
means = mpi_util.all_mean((r, 3.0))
mpi_util.print0(sums["a"], sums["b"][0].tolist(), sums["b"][1].tolist(), type(means).__name__, *means)
weights = collections.UserDict(w=np.full(2, 5.0 * (r == 0)), n=r)
mpi_util.rank0_bcast_wts(weights)
assert weights["w"].tolist() == [5.0, 5.0] and weights["n"] == 0
"""
REFUSED = """
class Table:  # as a DataFrame: columns of several types
    shape, columns = (2, 2), ["reward", "length"]
    def __array__(self, dtype=None, copy=None):
        return np.ones((2, 2))

for batch in ({"x": {1, 2}}, {"x": range(3)}, {"x": memoryview(b"ab")}, {"x": Table()}):
    name = type(batch["x"]).__name__
    for call in (mpi_util.rank0_accum_batches, mpi_util.all_sum):
        try:
            call(batch)
        except mpi_util.BatchError as error:
            assert f"{call.__name__}: 'x' is of class {name}, not known to be rows" in str(error), error
        else:
            raise SystemExit(f"{call.__name__} has taken a {name}")
"""
PACKED = """
import torch
from torch.nn.utils.rnn import pack_sequence
packed = pack_sequence([torch.ones(3), torch.ones(2)])
try:
    mpi_util.rank0_accum_batches({"obs": packed})
except mpi_util.BatchError as error:
    assert "'obs' is of class PackedSequence, not known to be rows" in str(error)
else:
    raise SystemExit("taken apart")
got = mpi_util.rank0_gather(packed)  # pickles
assert r or (len(got) == 2 and got[1].batch_sizes.tolist() == [2, 2, 1])

net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
loss = net(torch.ones(2, 3)).sum()
mpi_util.rank0_bcast_wts(net)  # in place, between forward and backward
try:
    loss.backward()
    seen = False
except RuntimeError as error:
    seen = "modified by an inplace operation" in str(error)
mpi_util.print0("autograd has seen it on", mpi_util.all_sum(seen))
"""
KEPT = """
import os, resource
best = []
for i in range(60):
    batch = mpi_util.rank0_accum_batches({"x": np.full((3000, 8), float(i))})
    if r == 0:
        best.append(batch["x"][7])
        if i == 9:
            files = len(os.listdir("/proc/self/fd"))
assert r or (len(os.listdir("/proc/self/fd")) <= files and [row[0] for row in best] == list(range(60)))
"""


def start(program, tmp_path, mpi):
    (tmp_path / "program.py").write_text(HEAD + program)
    done = run([sys.executable, tmp_path / "program.py"], 60, mpi_environment(mpi))
    assert done.status == 0, done.err
    return done.out


def test_every_mapping_is_a_dict_and_sums_take_nested_batches(tmp_path, mpi):
    out = start(MAPPINGS, tmp_path, mpi).splitlines()
    kinds = ["dict", "dict", "dict"]
    assert out[:3] == [f"{kind} ['act', 'obs'] [0, 0, 1, 1] [0, 1, 1, 2]" for kind in kinds]
    assert out[3] == "2 [1, 1] [2.0, 4.0] tuple 0.5 3.0"


def test_what_is_not_known_to_be_rows_is_refused(tmp_path, mpi):
    start(REFUSED, tmp_path, mpi)


@pytest.mark.torch
@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_packed_sequences_and_writes_that_autograd_sees(tmp_path, mpi):
    assert start(PACKED, tmp_path, mpi) == "autograd has seen it on 1\n"


def test_rows_that_are_kept_take_no_descriptors(tmp_path, mpi):
    start(KEPT, tmp_path, mpi)


def test_a_view_of_a_tensor_travels_as_what_it_shows():
    torch = pytest.importorskip("torch")
    whole = torch.arange(1_000_000.0)
    parts = [whole[3:5], whole.view(1000, 1000)[:, 1][:3], torch.nn.Parameter(whole[7:8]), whole[:2].requires_grad_()]
    parts[2].tag = "own"
    packed = pickles.pack("test", parts)
    assert len(packed) < 10_000
    for part, got in zip(parts, pickles.unpack(packed), strict=True):
        assert type(got) is type(part) and got.requires_grad == part.requires_grad and torch.equal(got, part)
        assert vars(got) == vars(part)


ON_GPU = """
import torch
batch = {"x": torch.full((3,), float(r), device="cuda"), "half": torch.ones(2, dtype=torch.bfloat16, device="cuda")}
for mine in ([batch], [batch] * r):  # then rank 0 has nothing of its own
    got = mpi_util.rank0_accum_batches(mine, index=list(range(10 * r, 10 * r + len(mine))))
    if r == 0:
        print(got["x"].tolist()[-3:], got["half"].dtype, *{value.device.type for value in got.values()})
mpi_util.print0(mpi_util.all_sum(batch)["x"].device.type)
"""


@pytest.mark.torch
def test_tensors_of_a_gpu_come_back_on_it():
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no GPU")
    done = run([sys.executable, "-c", HEAD + ON_GPU], 60, mpi_environment("mpich"))
    assert done.status == 0 and done.out == "[1.0, 1.0, 1.0] torch.bfloat16 cuda\n" * 2 + "cuda\n", done


@pytest.mark.torch
def test_what_torch_calculates_with_is_no_state_of_an_agent():
    import torch

    class Agent:
        def __init__(self):
            self.policy, self.scale, self.log_probs = torch.nn.Linear(2, 2), torch.ones(2), []

    names = []
    for n in (0, 3, 17):
        agent = Agent()
        agent.log_probs += [agent.policy(torch.ones(2)).sum() for _ in range(n)]
        names.append([slot.name for slot in slots(agent)])
    assert names[0] == names[1] == names[2] == ["policy/weight", "policy/bias", "scale"]
