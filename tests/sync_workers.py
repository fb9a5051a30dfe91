"""What the workers of tests/weight_sync/ run, and the models that they have."""

import contextlib
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import numpy as np

from mpi_util_weight_sync.receiver import Subscriber


def arrays(value: float) -> dict:
    return {
        "layer": {"w": np.full((30, 4), value, "f4"), "b": np.full(4, value)},
        "steps": np.array(int(value)),
        "none": np.zeros((0, 3)),
    }


def hard_module(seed: int):
    """BatchNorm, tied parameters, 0-d and zero-size tensors, bfloat16, a transposed one, a buffer that is not saved."""
    import torch

    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    )
    net[3].weight = net[2].weight
    net.register_buffer("none", torch.zeros(0, 3))
    net.register_buffer("scalar", torch.tensor(seed))
    net.register_buffer("unsaved", torch.full((2,), float(seed)), persistent=False)
    net.half_part = torch.nn.Parameter(torch.randn(3).to(torch.bfloat16))
    net.transposed = torch.nn.Parameter(torch.randn(3, 2).T)
    net[1](torch.randn(8, 4))
    return net


def follow(scheme, worker: int, pipe, last: int, pause: float = 0.0, slow: float = 0.0) -> None:
    """Receives in the background until version `last`, and reports what it has then. slow: seconds of `on_update`."""
    model = arrays(-1.0)
    time.sleep(pause)
    with scheme:
        on_update = (lambda _: time.sleep(slow)) if slow else None
        scheme.init_on_receiver(model_id="policy", worker_idx=worker, model=model, on_update=on_update)
        scheme.connect()
        pipe.send(("connected", scheme.version, float(model["layer"]["w"][0, 0])))
        wait_for(lambda: scheme.version >= last)
        with scheme.frozen():
            pipe.send(("done", scheme.version, float(model["layer"]["w"].mean())))


def follow_hard(scheme, worker: int, pipe, last: int, share: bool) -> None:
    import torch

    torch.set_num_threads(1)
    net = hard_module(100 + worker)
    with scheme:
        scheme.init_on_receiver(worker_idx=worker, model=net, zero_copy=share)
        scheme.connect()
        wait_for(lambda: scheme.version >= last)
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    after = net.state_dict()
    kept = all(torch.equal(before[name], after[name]) for name in after)
    values = {name: tensor.float().numpy() for name, tensor in {**after, "unsaved": net.unsaved}.items()}
    pipe.send((kept and net[3].weight is net[2].weight, values))


def follow_two(schemes, worker: int, pipe) -> None:
    models = [arrays(-1.0), {"v": np.zeros(3)}]
    for i, (scheme, model) in enumerate(zip(schemes, models)):
        scheme.init_on_receiver(model_id=f"model {i}", worker_idx=worker, model=model)
    for scheme in schemes:
        scheme.connect()
    wait_for(lambda: all(scheme.version >= 2 for scheme in schemes))
    pipe.send([float(models[0]["layer"]["w"][0, 0]), models[1]["v"].tolist()])
    for scheme in schemes:
        scheme.shutdown()


def idle(scheme, worker: int, pipe) -> None:
    """How much of a core a worker uses that waits for weights."""
    scheme.init_on_receiver(model_id="policy", worker_idx=worker, model=arrays(0.0))
    scheme.connect()
    time.sleep(0.2)
    start, used = time.perf_counter(), time.process_time()
    time.sleep(1.0)
    pipe.send((time.process_time() - used) / (time.perf_counter() - start))
    scheme.shutdown()


def die(scheme, worker: int, pipe, after: str) -> None:
    if after == "start":
        os._exit(3)
    scheme.init_on_receiver(model_id="policy", worker_idx=worker, model=arrays(0.0))
    scheme.connect()
    pipe.send("connected")
    if after == "version 2":
        wait_for(lambda: scheme.version == 2)
        time.sleep(0.2)  # its answer is on the way
    else:
        pipe.recv()
    os._exit(4)


def stop_before_reading(scheme, worker: int, pipe) -> None:
    """Connects to the sender, and is stopped before it reads anything."""
    subscriber = Subscriber(scheme._address, worker, "the model 'policy'")
    pipe.send("connected")
    os.kill(os.getpid(), signal.SIGSTOP)
    subscriber.close()


def stay(scheme, worker: int, pipe) -> None:
    """Until the sender has died."""
    scheme.init_on_receiver(model_id="policy", worker_idx=worker, model=arrays(0.0))
    scheme.connect()
    pipe.send("connected")
    wait_for(lambda: scheme.failure is not None)
    pipe.send(repr(scheme.failure))
    scheme.shutdown()


def send_and_die(pipe, workers_pipe) -> None:
    """A sender that is killed."""
    import multiprocessing

    from mpi_util_weight_sync import MultiProcessWeightSyncScheme

    scheme = MultiProcessWeightSyncScheme(timeout=30)
    scheme.init_on_sender(model_id="policy", model=arrays(1.0), num_workers=1)
    multiprocessing.get_context("fork").Process(target=stay, args=(scheme, 0, workers_pipe)).start()
    scheme.connect()
    os._exit(9)


def is_stopped(pid: int) -> bool:
    """True once SIGSTOP has stopped all threads: until its main thread has run, the others of a process go on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_for(test, timeout: float = 60.0) -> None:
    end = time.perf_counter() + timeout
    while not test():
        if time.perf_counter() > end:
            raise TimeoutError
        time.sleep(1e-3)


def keep_error(call, found: list) -> None:
    """Calls in a thread, and keeps what is raised."""
    try:
        call()
    except Exception as error:
        found.append(error)


@contextlib.contextmanager
def local_receivers(scheme, models: list, model_id=None, background: bool = True, first: int = 0, **options):
    """Receivers in threads of this process, each with a copy of the scheme as a worker would get it."""
    made = [pickle.loads(pickle.dumps(scheme)) for _ in models]
    for k, (receiver, model) in enumerate(zip(made, models)):
        receiver.init_on_receiver(model_id=model_id, worker_idx=first + k, model=model, **options)
    threads = [threading.Thread(target=r.connect, kwargs={"background": background}) for r in made]
    for thread in threads:
        thread.start()
    try:
        scheme.connect()
        for thread in threads:
            thread.join()
        yield made
    finally:
        for receiver in made:
            receiver.shutdown()
        scheme.shutdown()
