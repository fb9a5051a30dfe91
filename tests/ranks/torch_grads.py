"""Gradient averaging with torch modules, against a plain mean."""

import torch
from harness import fork, raises, run_checks

import mpi_util
from mpi_util.mpi_pytorch import mpi_avg_grads, setup_pytorch_for_mpi, sync_params

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
    net.zero_grad()
    mpi_avg_grads(net, comm=comm)
    assert all(p.grad is None for p in net.parameters())


run_checks(globals())
