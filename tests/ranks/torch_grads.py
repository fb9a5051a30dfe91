"""Gradient averaging with torch modules, against a plain mean."""

from types import SimpleNamespace

import torch
from harness import fork, raises, run_checks

import mpi_util
from mpi_util_spinup.mpi_pytorch import mpi_avg_grads, setup_pytorch_for_mpi, sync_params

fork()
setup_pytorch_for_mpi()
assert torch.get_num_threads() == max(1, mpi_util.usable_cores() // mpi_util.nworkers)


def module(seed, width=8):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))
    net.unused = torch.nn.Parameter(torch.zeros(3))
    net.bf16 = torch.nn.Parameter(torch.randn(3).bfloat16())
    net.wide = torch.nn.Parameter(torch.randn(4, 2, dtype=torch.float64))
    net.transposed = torch.nn.Parameter(torch.randn(2, 3).t())
    net.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    return net


def backward(net, rank):
    """What this rank's data makes of the gradients."""
    net.zero_grad()
    x = torch.full((4, 3), rank + 1.0) + torch.arange(12.0).reshape(4, 3)
    extra = net.bf16.float().sum() * rank + (net.wide * (rank + 0.5)).sum() + net.transposed.square().sum() * rank
    (net(x).square().sum() + extra).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def check_average(comm, rank, size):
    for width in (8, 20_000):
        net = module(0, width)
        all_grads = [backward(module(0, width), k) for k in range(size)]
        places = {name: grad.data_ptr() for name, grad in backward(net, rank).items() if grad is not None}
        mpi_avg_grads(net, comm=comm)
        for name, parameter in net.named_parameters():
            if parameter.grad is None:
                assert name in ("unused", "frozen")
                continue
            assert parameter.grad.data_ptr() == places[name]
            kind = parameter.dtype if parameter.dtype != torch.bfloat16 else torch.float32
            total = all_grads[0][name].to(kind)
            for grads in all_grads[1:]:
                total = total + grads[name].to(kind)
            assert torch.equal(parameter.grad, (total / size).to(parameter.dtype)), name


def check_ranks_stay_alike(comm, rank, size):
    net = module(rank)
    sync_params(net, comm=comm)
    assert mpi_util.chksum(net) == mpi_util.chksum(module(0))
    other = module(rank)  # what has parameters, and is no module
    sync_params(SimpleNamespace(parameters=other.parameters), comm=comm)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module(0).parameters()))
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(3):
        backward(net, rank)
        mpi_avg_grads(net, comm=comm)
        adam.step()
    parameters = dict(net.named_parameters())  # the running statistics of each rank are its own data's
    assert len(set(mpi_util.all_accum_batches([mpi_util.chksum(parameters)], comm=comm))) == 1


def check_a_gradient_on_some_ranks_only(comm, rank, size):
    net = module(0)
    backward(net, rank)
    if size > 1:
        for _ in range(2):
            backward(net, rank)
            if rank == size - 1:
                net[0].weight.grad = None
            raises(mpi_util.RankMismatchError, f"rank {size - 1}: None", lambda: mpi_avg_grads(net, comm=comm))
        other = module(0, 8 + (rank == 0))
        backward(other, rank)
        raises(mpi_util.RankMismatchError, "'0.weight'", lambda: mpi_avg_grads(other, comm=comm))
    raises(mpi_util.UsageError, "takes a torch module", lambda: mpi_avg_grads(list(net.parameters()), comm=comm))
    net.zero_grad()
    mpi_avg_grads(net, comm=comm)
    assert all(p.grad is None for p in net.parameters())


def with_gradients(grads):
    """What `mpi_avg_grads` needs of a module that has these gradients."""
    parameters = [(f"p{i}", SimpleNamespace(grad=grad)) for i, grad in enumerate(grads)]
    return SimpleNamespace(named_parameters=lambda: parameters)


def some_gradients(rank, width, dtypes):
    torch.manual_seed(rank)
    return [torch.randn(width, 3).to(dtype) for dtype in dtypes]


def means(width, dtypes, size):
    """Added up in rank order in at least 32 bits, and rounded once."""
    of_ranks = zip(*(some_gradients(k, width, dtypes) for k in range(size)))
    return [
        (sum(g.float() if g.dtype.itemsize < 4 else g for g in grads) / size).to(grads[0].dtype) for grads in of_ranks
    ]


def check_16_bit_gradients_are_rounded_once(comm, rank, size):
    for dtypes in ([torch.float16], [torch.bfloat16], [torch.float32, torch.bfloat16]):
        for width in (8, 200_000):  # along with the agreement, and apart
            grads = some_gradients(rank, width, dtypes)
            mpi_avg_grads(with_gradients(grads), comm=comm)
            assert size == 1 or all(map(torch.equal, grads, means(width, dtypes, size)))


class OnDevice(torch.Tensor):
    """A tensor of a device other than the CPU, which lets only copies go from one to the other, as CUDA does."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="meta")

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if "copy" not in function.__name__ and not all(isinstance(tensor, cls) for tensor in tensors):
            raise RuntimeError(f"{function.__name__}: expected all tensors to be on the same device")
        tree_map = torch.utils._pytree.tree_map_only
        args_inside, kwargs_inside = tree_map(cls, lambda tensor: tensor.values, (args, kwargs or {}))
        result = function(*args_inside, **kwargs_inside)
        in_place = function.__name__.partition(".")[0].endswith("_")
        return tree_map(torch.Tensor, cls, result) if not in_place else args[0] if result is not None else None


def check_a_sum_of_the_same_layout_before(comm, rank, size):
    """Views of the shared memory are kept by layout: those of a NumPy array `x` are not to be taken for a tensor's."""
    net = torch.nn.Module()
    net.x = torch.nn.Parameter(torch.zeros(6))
    for _ in range(3):
        assert mpi_util.all_mean(torch.full((6,), rank + 1.0), comm=comm)[0] == (size + 1) / 2
        net.x.grad = torch.full((6,), rank + 2.0)
        mpi_avg_grads(net, comm=comm)
        assert net.x.grad[0] == (size + 3) / 2


def check_gradients_that_autograd_has_not_evaluated(comm, rank, size):
    """The gradient of a complex parameter may come as a conjugate that is yet to be taken, or with a graph."""
    net = torch.nn.Module()
    net.a, net.b = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64)), torch.nn.Parameter(torch.ones(3))
    net.a.grad, net.b.grad = torch.full((3,), rank + 1j).conj(), net.b * (rank + 1)
    mpi_avg_grads(net, comm=comm)
    assert (net.a.grad == (size - 1) / 2 - 1j).all() and (net.b.grad == (size + 1) / 2).all()


def check_gradients_of_a_device(comm, rank, size):
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    for width in (8, 100_000):
        grads = [OnDevice(grad) for grad in some_gradients(rank, width, dtypes)]
        raises(RuntimeError, "same device", lambda grads=grads: grads[0].add_(torch.ones(3)))
        mpi_avg_grads(with_gradients(grads), comm=comm)
        assert size == 1 or all(map(torch.equal, (g.values for g in grads), means(width, dtypes, size)))


def check_a_sparse_gradient(comm, rank, size):
    grads = [torch.ones(3), torch.ones(3).to_sparse()]
    raises(mpi_util.BatchError, "'p1' is sparse", lambda: mpi_avg_grads(with_gradients(grads), comm=comm))


run_checks(globals())
