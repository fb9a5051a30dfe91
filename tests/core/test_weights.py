"""Attributes of models that are not sent with the weights: which differ between ranks is printed once, if any does."""

import sys

import pytest
from conftest import run

SAYS = "of the model differs between ranks and is not sent"

TORCH = """
import sys, warnings, mpi_util
if mpi_util.mpi_fork(3) == "parent":
    sys.exit()
warnings.simplefilter("ignore")
import numpy as np, torch
from torch import nn
from torch.nn.utils import parametrizations, prune
rank = mpi_util.rank
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.norm, self.drop = nn.LSTM(3, 4, 2, dropout=0.1), nn.BatchNorm1d(4), nn.Dropout(0.2)
        linear = [nn.Linear(4, 4) for _ in range(5)]
        self.old = nn.Sequential(nn.utils.weight_norm(linear[0]), nn.utils.spectral_norm(linear[1]))
        self.new = nn.Sequential(parametrizations.weight_norm(linear[2]), parametrizations.spectral_norm(linear[3]))
        self.pruned, self.lazy = prune.random_unstructured(linear[4], "weight", 0.3), nn.LazyLinear(2)
        self.seed, self.epsilon, self.var, self.rows = rank, 0.5, torch.ones(2), np.zeros((1000, 10000))

    def forward(self, x):
        return self.lazy(self.pruned(self.new(self.old(self.drop(self.norm(self.lstm(x)[0][:, -1]))))))


def rollout():
    net.eval()
    with torch.no_grad():
        for _ in range(rank + 1):
            net(torch.randn(4, 5, 3))


torch.manual_seed(rank)
net = Net()
net(torch.randn(4, 5, 3))
compiled = torch.compile(nn.Linear(2, 2), backend="eager")
sgd, rates = torch.optim.SGD(net.parameters(), 0.1), {"epsilon": 0.5}
for i in range(3):
    mpi_util.rank0_bcast_wts([net, compiled, rates])
    net.epsilon = rates["epsilon"]
    rollout()
    compiled(torch.ones(1 + rank, 2))
    if rank == 0:
        net.train()
        net(torch.randn(4, 5, 3)).sum().backward()
        sgd.step()
        rollout()
        net.best = 3.0  # on one rank alone
        rates["epsilon"] = net.epsilon = net.epsilon / 2  # sent beside
print("none so far", file=sys.stderr, flush=True)
mpi_util.all_sum(0)
if rank == 0:
    exec(sys.argv[1])
for call in (mpi_util.rank0_bcast_wts, mpi_util.all_avg_wts, mpi_util.rank0_bcast_wts):
    call({"pi": net})
"""


MODE = """
import sys, mpi_util
if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
net[2].eval()
for i in range(3):
    batch = mpi_util.collect(lambda: {"y": [net.training, net[1].training, net[2].training]}, envs=None, episodes=4,
        weights={"pi": net}, seed=1)
    if batch is not None:
        print(batch["y"])
        net.eval() if i else net.train(), net[2].train(i == 0)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_a_torch_module_has_rank_0s_mode_on_all_ranks(tmp_path):
    (tmp_path / "program.py").write_text(MODE)
    alone, together = (run([sys.executable, tmp_path / "program.py", n], 120) for n in (1, 3))
    assert alone.out.splitlines() == [str(4 * mode) for mode in ([True, True, False], 3 * [True], 3 * [False])]
    assert (together.status, together.out, together.err) == (0, alone.out, "")


@pytest.mark.torch
@pytest.mark.slow
def test_an_attribute_of_a_torch_module_that_differs_is_named_once(tmp_path):
    (tmp_path / "program.py").write_text(TORCH)
    change = "net.epsilon = 0.25; net.var = torch.ones(3); net.rows[500:] = 1; net.drop.p = 0.1"
    done = run([sys.executable, tmp_path / "program.py", change], 120)
    assert done.status == 0, done.err
    before, _, after = done.err.rpartition("none so far\n")
    assert SAYS not in before, before
    (line,) = [line for line in after.splitlines() if line.startswith("mpi_util: ")]
    assert f"'pi.epsilon, pi.var, pi.rows, pi.drop.p' {SAYS}" in line


KERAS = """
import sys, mpi_util
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
import keras, numpy as np, tensorflow as tf
rank = mpi_util.rank


class Scale(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.inner = np.ones(3), tf.constant([1.0, 2.0, 3.0]), keras.layers.Dropout(0.1)

    def call(self, x):
        return self.inner(x)


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.w, self.epsilon, self.part = tf.Variable([1.0]), 0.1, tf.Module()


for _ in range(rank):
    keras.layers.Dense(1)
cells = [keras.layers.LSTM(3, dropout=0.1), Scale(), keras.layers.Dense(2), keras.layers.BatchNormalization()]
net, module = keras.Sequential([keras.Input((3, 2)), *cells]), Module()
for i in range(3):
    mpi_util.rank0_bcast_wts([net, module])
    if rank == 0:
        net.compile("adam", "mse", run_eagerly=i == 1)
        net.fit(np.ones((4, 3, 2)), np.ones((4, 2)), verbose=0)
    net.predict(np.ones((4, 3, 2)), verbose=0)
print("none so far", file=sys.stderr, flush=True)
mpi_util.all_sum(0)
if rank == 0:
    module.epsilon, net.layers[1].scale, net.layers[1].shift = 0.2, np.ones(3) * 2, tf.constant([1.0, 2.0, 4.0])
    net.layers[1].inner.rate = 0.2
for _ in range(2):
    mpi_util.rank0_bcast_wts([net, module])
"""


@pytest.mark.tensorflow
def test_an_attribute_of_a_keras_layer_or_a_tf_module_that_differs_is_named_once(tmp_path):
    (tmp_path / "program.py").write_text(KERAS)
    done = run([sys.executable, tmp_path / "program.py"], 120, {"TF_CPP_MIN_LOG_LEVEL": "3"})
    before, _, after = done.err.rpartition("none so far\n")
    assert done.status == 0 and SAYS not in before, done.err
    names = "0.4/scale.scale, 0.4/scale.shift, 0.5/dropout.rate, 1.Module.epsilon"
    assert after.count(SAYS) == 1 and f"'{names}' {SAYS}" in after, after
