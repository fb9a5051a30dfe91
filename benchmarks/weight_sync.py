"""The weight-sync schemes, between processes and between ranks, against torchrl's two of one machine.

    python -m benchmarks.weight_sync          (needs the extra torchrl)

Two Humanoid-v4 policies, 2x64 and Patrick Coady's sizes, to 2 and 10 workers that have a torch module each. Clocked is
`send`, acknowledged: until the sender knows that every worker has the new weights. Every alternative has a thread in
the same workers, and all take turns, with 2 ms between one and the next, and again with 20 ms, in which the processors
sleep and forget what they had in their caches ("cold"). "share" is `zero_copy=True`. torchrl's SharedMem
writes into memory that all workers use as they go: no copy in the worker, and nothing that keeps versions apart. The
memcpy is one numpy.copyto of the same bytes while all others sleep. Memory is the PSS of the sender and its workers
together, less what the same costs with the small policy (code, threads); the workers' own modules are there before.
Idle is the CPU time of a process with one receiver.
"""

import argparse
import importlib.metadata
import itertools
import multiprocessing
import time
from functools import partial
from typing import Any

import numpy as np
import psutil

import mpi_util
from benchmarks import record
from mpi_util_weight_sync import MPIWeightSyncScheme, MultiProcessWeightSyncScheme
from policies.actor import parse_hid_list

OBS_DIM, ACT_DIM = 376, 17  # of Humanoid-v4
HIDDEN = {"2x64": (64, 64), "4.6 million": parse_hid_list("auto", OBS_DIM, ACT_DIM, "policy")}
PROCESSES = ("processes", "processes, share")
RANKS = ("ranks", "ranks, share")
TORCHRL = ("torchrl MultiProcess", "torchrl SharedMem")
PAUSES_S = {"": 0.002, ", cold": 0.02}
IDLE_S = 2.0


def main() -> None:
    """Starts a part for each policy and number of workers, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=40, ranks="2,10")
    parser.add_argument("--policy", choices=HIDDEN, help="only this one (default: both)")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return memory_part(args) if args.memory else part(args)
    samples, claims = {}, []
    for name in [args.policy] if args.policy else HIDDEN:
        for n in args.ranks:
            for mpi in args.mpi:
                arguments = ("--policy", name, "--ranks", n, "--repeats", args.repeats)
                seconds = record.run_part("benchmarks.weight_sync", mpi, *arguments)
                found = {way: record.spread(values) for way, values in seconds.items()}
                samples[f"{name}, {n} workers, {mpi}"] = found
                medians = {way: spread["median"] for way, spread in found.items()}
                claims += claims_of(f"{name} policy to {n} workers", n, medians)
    held, code = (
        record.run_part("benchmarks.weight_sync", args.mpi[0], "--memory", "--policy", name, "--ranks", max(args.ranks))
        for name in ("4.6 million", "2x64")
    )
    copies = {way: (held[way] - code[way]) / held["one copy"] for way in PROCESSES}
    text = f"to {max(args.ranks)} workers: memory beside their modules / one copy of the weights"
    claims += [record.claim(f"{way}, {text}", copies[way], at_most=1.0) for way in PROCESSES]
    claims.append(record.claim("CPU time of an idle worker, share of a core", held["idle"], at_most=0.01))
    record.save(args, samples, claims, unit="seconds", torchrl=importlib.metadata.version("torchrl"))


def claims_of(what: str, n: int, median_s: dict[str, float]) -> list[dict[str, Any]]:
    """What is claimed of one policy and number of workers, with the short pause."""
    small = "million" not in what
    targets = {"torchrl MultiProcess": 0.1 if small else 0.2, "torchrl SharedMem": 0.5 if small else 1.0}
    found = [
        record.claim(f"{way}, {what}: time / {other}", median_s[way] / median_s[other], at_most=target)
        for way in PROCESSES + RANKS
        for other, target in targets.items()
    ]
    if not small:
        target = 2 * max(1.0, n / mpi_util.usable_cores())
        found += [
            record.claim(f"{way}, {what}: time / memcpy", median_s[way] / median_s["memcpy"], at_most=target)
            for way in PROCESSES + RANKS
        ]
    return found


def make_module(name: str) -> Any:
    """The policy, as a torch module."""
    import torch

    torch.set_num_threads(1)
    sizes = (OBS_DIM, *HIDDEN[name], ACT_DIM)
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def part(args: argparse.Namespace) -> None:
    """Measures one policy and number of workers: as many processes as ranks, one more rank that sends."""
    n = args.ranks[0]
    if mpi_util.mpi_fork(n + 1) == "parent":
        return
    by_ranks = {way: MPIWeightSyncScheme(timeout=120) for way in RANKS}
    if mpi_util.rank:
        return receive_in_rank(args.policy, by_ranks)
    import tensordict
    import torch
    from torchrl.weight_update import MultiProcessWeightSyncScheme as QueueScheme
    from torchrl.weight_update import SharedMemWeightSyncScheme

    module = make_module(args.policy)
    values = tensordict.TensorDict.from_module(module).data
    ctx = torch.multiprocessing.get_context("spawn")
    others = dict(zip(TORCHRL, (QueueScheme(), SharedMemWeightSyncScheme())))
    for scheme in others.values():
        devices = [torch.device("cpu")] * n
        scheme.init_on_sender(model_id="policy", weights=values.clone(), devices=devices, ctx=ctx)
    ours = {way: MultiProcessWeightSyncScheme(timeout=120) for way in PROCESSES} | by_ranks
    for scheme in ours.values():
        scheme.init_on_sender(model_id="policy", model=module, num_workers=n)
    pipes, workers = zip(*(start_worker(ctx, args.policy, k, others, ours) for k in range(n)))
    for scheme in [*others.values(), *ours.values()]:
        scheme.connect()
    for pipe in pipes:
        pipe.recv()
    source = np.ones(sum(param.nbytes for param in module.parameters()), np.uint8)
    alternatives = {}
    for text, pause_s in PAUSES_S.items():
        for way, scheme in (ours | others).items():
            weights = module if way in ours else values
            alternatives[way + text] = partial(clock, scheme.send, weights, module, pause_s)
        alternatives["memcpy" + text] = partial(clock_memcpy, np.zeros_like(source), source, pause_s)
    seconds = record.in_turn(alternatives, args.repeats, warmup=3)
    for way, scheme in [*ours.items(), *others.items()]:
        with torch.no_grad():
            module[0].weight.fill_(42.0)
        scheme.send(module if way in ours else values)
    for pipe in pipes:
        pipe.send("show")
        if wrong := [way for way, value in pipe.recv().items() if value != 42.0]:
            raise RuntimeError(f"a worker did not get the weights of {wrong}")
    for scheme in ours.values():
        scheme.shutdown()
    for worker in workers:
        worker.join()
    record.write_part(args.part, seconds)


def start_worker(ctx: Any, policy: str, k: int, others: dict, ours: dict) -> tuple[Any, Any]:
    """(pipe, process) of worker k."""
    here, there = ctx.Pipe()
    schemes = others | {way: ours[way] for way in PROCESSES}
    process = ctx.Process(target=receive_in_process, args=(policy, k, there, schemes), daemon=True)
    process.start()
    return here, process


def receive_in_process(policy: str, k: int, pipe: Any, schemes: dict) -> None:
    """A worker: a module and a thread for each alternative."""
    modules = {way: make_module(policy) for way in schemes}
    for way, scheme in schemes.items():
        share = {"zero_copy": True} if way.endswith("share") else {}
        scheme.init_on_receiver(model_id="policy", model=modules[way], worker_idx=k, **share)
    for way, scheme in schemes.items():
        scheme.connect(**({"worker_idx": k} if way in TORCHRL else {}))
    pipe.send("connected")
    pipe.recv()
    pipe.send({way: float(module[0].weight.detach()[-1, -1]) for way, module in modules.items()})


def receive_in_rank(policy: str, schemes: dict[str, Any]) -> None:
    """A rank: a module and a thread for each of ours; ends when the sender shuts down."""
    modules = {way: make_module(policy) for way in schemes}
    for way, scheme in schemes.items():
        scheme.init_on_receiver(model_id="policy", model=modules[way], zero_copy=way.endswith("share"))
    for scheme in schemes.values():
        scheme.connect()
    for way, scheme in schemes.items():
        scheme._receiver.thread.join()
        if float(modules[way][0].weight.detach()[-1, -1]) != 42.0:
            raise RuntimeError(f"rank {mpi_util.rank} did not get the weights of {way}")


def clock(send: Any, weights: Any, module: Any, pause_s: float) -> float:
    """Seconds of one acknowledged send of new values."""
    import torch

    with torch.no_grad():
        module[0].weight.add_(1.0)
    time.sleep(pause_s)
    start = time.perf_counter()
    send(weights)
    return time.perf_counter() - start


def clock_memcpy(target: np.ndarray, source: np.ndarray, pause_s: float) -> float:
    """Seconds of one copy of bytes that were just written."""
    source += 1
    time.sleep(pause_s)
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def memory_part(args: argparse.Namespace) -> None:
    """What the sender and its workers hold beside the modules, in bytes; what an idle worker costs."""
    n, ctx, found = args.ranks[0], multiprocessing.get_context("fork"), {}
    module = make_module(args.policy)
    found["one copy"] = sum(param.nbytes for param in module.parameters())
    for way in PROCESSES:
        scheme = MultiProcessWeightSyncScheme(timeout=120)
        scheme.init_on_sender(model=module, num_workers=n)
        pipes, processes = [], []
        for k in range(n):
            here, there = ctx.Pipe()
            process = ctx.Process(target=hold, args=(args.policy, k, there, scheme, way.endswith("share")))
            process.start()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        before = pss(processes)
        for pipe in pipes:
            pipe.send("connect")
        scheme.connect()
        for _ in range(5):
            scheme.send()
        found[way] = pss(processes) - before
        idle = [pipe.recv() for pipe in pipes]
        found["idle"] = max(found.get("idle", 0.0), *idle)
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join()
        scheme.shutdown()
    record.write_part(args.part, found)


def hold(policy: str, k: int, pipe: Any, scheme: Any, share: bool) -> None:
    """A worker that has a module and waits."""
    module = make_module(policy)
    pipe.send("made")
    pipe.recv()
    scheme.init_on_receiver(worker_idx=k, model=module, zero_copy=share)
    scheme.connect()
    time.sleep(1.0)  # until the sends are over
    used = time.process_time()
    time.sleep(IDLE_S)
    pipe.send((time.process_time() - used) / IDLE_S)
    pipe.recv()
    scheme.shutdown()


def pss(processes: list) -> int:
    """Bytes of this process and those, what is shared counted once."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in [None, *(p.pid for p in processes)])


if __name__ == "__main__":
    main()
