"""Weights from one rank to the others, each at its own pace."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from harness import fork, raises

import mpi_util
from mpi_util_weight_sync import MPIWeightSyncScheme, mpi

fork()
rank, size = mpi_util.rank, mpi_util.nworkers
BIG = 1_300_000  # float64: more than one part between machines


def model(value):
    return {"w": np.full((50, 7), value, "f4"), "deep": [np.array(value), np.zeros((0, 2))], "n": np.arange(3)}


def wait_for(test):
    end = time.perf_counter() + 60
    while not test():
        assert time.perf_counter() < end
        time.sleep(1e-3)


def stop(pid):
    """Until the main thread of a process has received SIGSTOP, its others go on."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def stop_at_second_transfer(bulk):
    """In place of TagSpace.bulk: this process is stopped while version 2 arrives."""
    transfers = []

    def receive_or_stop(self, sends, block, rank):
        transfers.append(bulk(self, sends, block, rank))
        if len(transfers) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # the main thread receives it
        return transfers[-1]

    return receive_or_stop


def shut_down_in_a_fork(scheme):
    """As a child of the sender does that leaves its `with` block: the sender's workers go on."""
    if (child := os.fork()) == 0:
        scheme.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def check_in_the_background():
    mine = model(-float(rank) - 1)
    with MPIWeightSyncScheme(timeout=60) as scheme:
        if rank == 0:
            scheme.init_on_sender(model_id="policy", model=mine)
            assert scheme.connect() is None
            for value in range(5):
                mine["w"][:] = value
                scheme.send()
                if value == 1:
                    shut_down_in_a_fork(scheme)
            assert scheme.versions == dict.fromkeys(range(size - 1), 6)
            if size > 2:
                scheme.send(model(50.0), worker_ids=size - 2)
                assert scheme.versions == {**dict.fromkeys(range(size - 2), 6), size - 2: 7}
            mpi_util.bcast(0)
        else:
            scheme.init_on_receiver(model_id="policy", model=mine)
            scheme.connect()
            last = 7 if rank == size - 1 and size > 2 else 6
            wait_for(lambda: scheme.version == last)
            with scheme.frozen():
                assert (mine["w"] == (50.0 if last == 7 else 4.0)).all()
            mpi_util.bcast(0)
            assert scheme.version == last


def check_another_sender_at_the_receivers_pace():
    sender = size - 1
    mine = {"big": np.full(BIG, float(rank)), "small": np.zeros(2)}
    other = {"v": np.full(3, float(rank), "f4")}
    schemes = [MPIWeightSyncScheme(timeout=60, sender=sender) for _ in range(2)]
    for scheme, weights in zip(schemes, (mine, other)):
        if rank == sender:
            scheme.init_on_sender(weights=weights)
        else:
            scheme.init_on_receiver(model=weights)
        scheme.connect(background=False)
    if rank == sender:
        for value in range(3):
            mine["big"][:] = value
            schemes[0].send_async()
        other["v"][:] = 1.0
        schemes[1].send_async()
        mpi_util.all_sum(0)  # all versions have been sent
        for scheme in schemes:
            scheme.wait_async()
    else:
        mpi_util.all_sum(0)  # all versions have been sent
        wait_for(lambda: schemes[0].receive(1) == 4 or schemes[0].version == 4)
        assert (mine["big"] == 2).all()
        assert schemes[1].receive() == 2 and (other["v"] == 1.0).all()
    mpi_util.all_sum(0)
    for scheme in schemes:
        scheme.shutdown()


def check_receivers_that_come_late_get_the_newest():
    scheme, mine = MPIWeightSyncScheme(sync=False, timeout=60), {"w": np.full(2_000_000, float(rank), "f4")}
    if rank == 0:
        scheme.init_on_sender(model=mine)
        scheme.connect()
        for value in (5.0, 6.0):
            mine["w"][:] = value
            scheme.send()
        mpi_util.all_sum(0)
        scheme.wait_async()
        assert scheme.versions == dict.fromkeys(range(size - 1), 3)
    else:
        mpi_util.all_sum(0)
        scheme.init_on_receiver(model=mine)
        scheme.connect(background=False)
        assert scheme.version == 3
    assert (mine["w"] == 6.0).all()
    mpi_util.all_sum(0)
    scheme.shutdown()


def check_errors():
    scheme = MPIWeightSyncScheme(timeout=60)
    if rank == 0:
        raises(mpi_util.UsageError, "ranks beside", lambda: scheme.init_on_sender(model=model(0), num_workers=size + 3))
        raises(mpi_util.UsageError, "is the sender", lambda: scheme.init_on_receiver(model=model(0)))
        if size > 1:
            others = {k: model(0) for k in range(1, size)}
            raises(mpi_util.UsageError, "ranks beside", lambda: scheme.init_on_sender(params_map=others))
        scheme.init_on_sender(model=model(0.0))
        if size > 1:
            text = f"worker {size - 2} could not take version 1"
            raises(mpi_util.WorkerError, text, scheme.connect)
    else:
        raises(mpi_util.UsageError, "is the sender", lambda: scheme.init_on_sender(model=model(0)))
        raises(mpi_util.UsageError, "is worker", lambda: scheme.init_on_receiver(model=model(0), worker_idx=size))
        mine = model(0.0)
        if rank == size - 1:
            mine["w"] = np.zeros((1, 7), "f4")
        scheme.init_on_receiver(model=mine)
        if rank == size - 1:
            raises(mpi_util.WeightsError, "'w'", scheme.connect)
        else:
            scheme.connect()
    mpi_util.all_sum(0)
    scheme.shutdown()


def check_a_receiver_that_leaves_in_order():
    scheme, mine = MPIWeightSyncScheme(timeout=60), model(float(rank))
    if rank == 0:
        scheme.init_on_sender(model=mine)
        scheme.connect()
        mpi_util.all_sum(0)
        if size > 2:
            scheme.send()
            assert scheme.versions[0] == 2
            raises(mpi_util.WorkerLeftError, f"worker {size - 2}", lambda: scheme.send(worker_ids=size - 2))
        elif size == 2:
            raises(mpi_util.WorkerLeftError, "worker 0", scheme.send)
    else:
        scheme.init_on_receiver(model=mine)
        scheme.connect()
        if rank == size - 1:
            scheme.shutdown()
            time.sleep(0.1)  # the sender has received that
        mpi_util.all_sum(0)
    mpi_util.all_sum(0)
    scheme.shutdown()


if "gone" in sys.argv:
    root = int(sys.argv[-1])
    scheme = MPIWeightSyncScheme(sender=root)
    if rank == root:
        scheme.init_on_sender(model=model(0.0))
        scheme.connect()
elif "stopped" in sys.argv:
    # each rank is a machine
    scheme, mine = MPIWeightSyncScheme(timeout=60), {"w": np.full(4_000_000, float(rank), "f4")}
    pid = mpi_util.all_sum(os.getpid() if rank == 1 else 0)
    if rank == 0:
        scheme.init_on_sender(model=mine)
        if "first" in sys.argv:
            stop(pid)
            scheme.timeout = 2.0
            raises(mpi_util.SyncTimeoutError, "worker 0 has not connected", scheme.connect)
            scheme.timeout = 60.0
        else:
            scheme.connect()
            if "before" in sys.argv:
                stop(pid)
            raises(mpi_util.SyncTimeoutError, "worker 0 has version 1", lambda: scheme.send(timeout=2.0))
        sent = scheme.version
        assert scheme.versions[1] == sent, scheme.versions
        for value in range(3):  # the other rank gets them meanwhile
            mine["w"][:] = value
            scheme.send(worker_ids=1)
        os.kill(pid, signal.SIGCONT)
        scheme.wait_async()
        assert scheme.versions == {0: sent, 1: sent + 3}, scheme.versions
        mine["w"][:] = 7.0
        scheme.send()
        assert scheme.versions == dict.fromkeys(range(2), sent + 4), scheme.versions
    else:
        if rank == 1 and "midway" in sys.argv:
            mpi.TagSpace.bulk = stop_at_second_transfer(mpi.TagSpace.bulk)
        scheme.init_on_receiver(model=mine)
        scheme.connect()
    mpi_util.all_sum(0)
    assert (mine["w"] == 7.0).all()
    scheme.shutdown()
    mpi_util.print0("weight sync: well")
elif "busy" in sys.argv:
    # the sender computes, and calls neither MPI nor the scheme, while the other machine connects and receives
    scheme, mine = MPIWeightSyncScheme(sync=False, timeout=60), {"w": np.zeros(2_000_000)}
    if rank == 0:
        scheme.init_on_sender(model=mine)
        scheme.connect()
        for value in range(1, 21):
            mine["w"][:] = value
            scheme.send()
        time.sleep(5)
        assert scheme.versions == {0: 21}, scheme.versions
    else:
        time.sleep(1)
        scheme.init_on_receiver(model=mine)
        began = time.perf_counter()
        scheme.connect(background=False)
        assert scheme.version == 21 and (mine["w"] == 20).all() and time.perf_counter() - began < 3, scheme.version
    mpi_util.all_sum(0)
    scheme.shutdown()
    mpi_util.print0("weight sync: well")
elif "many" in sys.argv:
    schemes = [MPIWeightSyncScheme() for _ in range(int(sys.argv[-1]))]
    check_in_the_background()
    mpi_util.print0("weight sync: well")
else:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
    mpi_util.print0("weight sync: well")
