"""The weight-sync scheme between processes, and between threads that have the scheme as a worker would get it."""

import contextlib
import copy
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
from sync_workers import (
    arrays,
    die,
    follow,
    follow_hard,
    follow_two,
    hard_module,
    idle,
    is_stopped,
    keep_error,
    local_receivers,
    send_and_die,
    stop_before_reading,
    wait_for,
)

from mpi_util import UsageError, WeightsError, WorkerError, WorkerLeftError
from mpi_util.errors import MissingFrameworkError, SyncTimeoutError
from mpi_util_weight_sync import MultiProcessWeightSyncScheme
from mpi_util_weight_sync.layout import Weights
from mpi_util_weight_sync.publisher import State
from mpi_util_weight_sync.readers_writer_lock import ReadersWriterLock
from mpi_util_weight_sync.sections import Reader, Section

TIMEOUT = 60


@pytest.fixture
def start():
    """start(function, scheme, worker, ...): a process, by fork or spawn, and this side's end of its pipe."""
    processes = []

    def begin(function, *arguments, method="fork", at=2):
        ctx = multiprocessing.get_context(method)
        ours, theirs = ctx.Pipe()
        process = ctx.Process(target=function, args=(*arguments[:at], theirs, *arguments[at:]), daemon=False)
        process.start()
        theirs.close()
        processes.append(process)
        return process, ours

    yield begin
    for process in processes:
        process.join(20)
        alive = process.is_alive()
        if alive:
            process.kill()
        assert not alive, f"{process.name} did not end"


def scheme_for(n, model=None, **options):
    scheme = MultiProcessWeightSyncScheme(**{"timeout": TIMEOUT, **options})
    scheme.init_on_sender(model_id="policy", model=arrays(1.0) if model is None else model, num_workers=n)
    return scheme


# ---- phase 1


FORMS = {
    "model, num_workers": lambda w: {"model": w, "num_workers": 2},
    "weights, num_workers": lambda w: {"weights": w, "num_workers": 2},
    "params_map": lambda w: {"params_map": {0: w, 1: {"w": w["w"] * 2}}},
    "params_map, shared": lambda w: {"params_map": {0: w, 1: w}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_phase_1(form):
    weights = {"w": np.arange(6.0)}
    keep = FORMS[form](weights)
    scheme = MultiProcessWeightSyncScheme(timeout=TIMEOUT)
    scheme.init_on_sender(**keep)
    models = [{"w": np.zeros(6)}, {"w": np.zeros(6)}]
    with local_receivers(scheme, models, keep.get("model_id")) as receivers:
        factor = 2 if form == "params_map" else 1
        assert models[0]["w"].tolist() == weights["w"].tolist()
        assert models[1]["w"].tolist() == (weights["w"] * factor).tolist()
        weights["w"] += 1
        assert scheme.send() == 2 and scheme.versions == {0: 2, 1: 2}
        assert models[0]["w"].tolist() == weights["w"].tolist()
        assert [receiver.version for receiver in receivers] == [2, 2]


CLASHES = {
    "params_map= and model=": {"params_map": {0: 1}, "model": 1},
    "params_map= and weights=": {"params_map": {0: 1}, "weights": 1},
    "params_map= and context=": {"params_map": {0: 1}, "context": 1},
    "context= and model=": {"context": 1, "model": 1, "model_id": "x"},
    "context= and weights=": {"context": 1, "weights": 1, "model_id": "x"},
    "context= needs model_id=": {"context": 1},
    "model= and weights=": {"model": 1, "weights": 1, "num_workers": 1},
    "num_workers= says 3 workers and params_map= 1": {"params_map": {0: 1}, "num_workers": 3},
    "how many workers": {"model": 1},
    "give model=": {"num_workers": 2},
}


@pytest.mark.parametrize("text", CLASHES)
def test_arguments_that_exclude_each_other(text):
    with pytest.raises(UsageError, match=text):
        MultiProcessWeightSyncScheme().init_on_sender(**CLASHES[text])


def test_arguments_of_the_receiver():
    scheme = scheme_for(2)
    for text, given in {
        "no model=": {"context": 1, "model": {}, "model_id": "policy"},
        "needs model_id": {"context": 1},
        "worker_idx": {"model": {"w": np.zeros(1)}},
    }.items():
        with pytest.raises(UsageError, match=text):
            pickle.loads(pickle.dumps(scheme)).init_on_receiver(**given)
    scheme.shutdown()


@pytest.mark.parametrize("option", ["strategy", "on_dead"])
def test_unknown_options(option):
    with pytest.raises(UsageError, match=option):
        MultiProcessWeightSyncScheme(**{option: "other"})


def test_calls_in_the_wrong_state():
    scheme = MultiProcessWeightSyncScheme()
    for call, text in [
        (scheme.connect, "before init_on_sender"),
        (scheme.send, "before init_on_sender"),
        (scheme.receive, "before init_on_receiver"),
        (lambda: scheme.init_on_receiver(worker_idx=0), "no sender"),
    ]:
        with pytest.raises(UsageError, match=text):
            call()
    scheme.init_on_sender(model=arrays(0.0), num_workers=1)
    for call, text in [
        (scheme.send, "before connect"),
        (scheme.send_async, "before connect"),
        (scheme.wait_async, "before connect"),
        (lambda: scheme.init_on_sender(model=arrays(0.0), num_workers=1), "initialised already"),
    ]:
        with pytest.raises(UsageError, match=text):
            call()
    scheme.shutdown()
    with pytest.raises(UsageError, match="after shutdown"):
        scheme.send()


# ---- what is sent


def test_every_form_of_weights():
    net, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    scheme = scheme_for(1, net)
    mine = torch.nn.Linear(3, 2)
    with local_receivers(scheme, [mine], "policy"):
        numbers = {name: tensor.detach().numpy() for name, tensor in other.named_parameters()}
        for given in (None, other, other.state_dict(), numbers, [other.weight, other.bias.detach().numpy()]):
            scheme.send(net)
            scheme.send(given)
            expected = net if given is None else other
            assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), expected.state_dict().values()))


def test_nested_names_are_those_of_the_module():
    net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    scheme = scheme_for(1, {"0": {"weight": np.ones((1, 2), "f4"), "bias": np.full(1, 2, "f4")}})
    with local_receivers(scheme, [net], "policy"):
        assert net[0].weight.tolist() == [[1, 1]] and net[0].bias.tolist() == [2]


@pytest.mark.torchrl
def test_a_tensordict():
    import tensordict

    net, mine = hard_module(1), hard_module(2)
    scheme = MultiProcessWeightSyncScheme("tensordict", timeout=TIMEOUT)
    scheme.init_on_sender(weights=tensordict.TensorDict.from_module(net), num_workers=1)
    with local_receivers(scheme, [mine]):
        assert same(net, mine)
        scheme.send(tensordict.TensorDict.from_module(hard_module(3)))
        assert same(hard_module(3), mine)


@pytest.mark.tensorflow
def test_keras_and_a_list_of_variables():
    import keras

    def make(value):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
        model.set_weights([np.full(w.shape, value, w.dtype) for w in model.get_weights()])
        return model

    sender, mine = make(1.0), make(0.0)
    scheme = scheme_for(1, sender)
    with local_receivers(scheme, [mine], "policy"):
        assert all((w == 1).all() for w in mine.get_weights())
        scheme.send([variable.value for variable in make(2.0).weights])
        assert len(mine.get_weights()) == 6 and all((w == 2).all() for w in mine.get_weights())


def same(a, b) -> bool:
    tensors = [{**dict(net.named_parameters()), **dict(net.named_buffers())} for net in (a, b)]
    return all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.parametrize("share", [False, True], ids=["copied", "shared"])
def test_a_hard_module(start, share):
    net = hard_module(0)
    bits = pickle.dumps(net.state_dict())
    scheme = MultiProcessWeightSyncScheme(timeout=TIMEOUT)
    scheme.init_on_sender(model=net, num_workers=2)
    pipes = [start(follow_hard, scheme, k, 3, share)[1] for k in range(2)]
    scheme.connect()
    assert pickle.dumps(net.state_dict()) == bits  # the sender's are only read
    scheme.send()
    with torch.no_grad():
        net.scalar.fill_(7)
        net.unsaved.fill_(8)
        net[1](torch.ones(8, 4))
    scheme.send(net.state_dict())  # which has tied weights twice, and no buffer that is not saved
    for pipe in pipes:
        well, values = pipe.recv()
        assert well
        for name, tensor in {**net.state_dict(), "unsaved": net.unsaved}.items():
            assert np.array_equal(values[name], tensor.float().numpy()), name
    scheme.shutdown()


def test_what_a_worker_writes_into_shared_weights_is_its_own():
    net, mine = torch.nn.Linear(200, 200), [torch.nn.Linear(200, 200) for _ in range(2)]
    scheme = scheme_for(2, net)
    with local_receivers(scheme, mine, "policy", zero_copy=True):
        expected = net.weight.detach().clone()
        for _ in range(4):
            with torch.no_grad():
                mine[0].weight.add_(1)
            assert torch.equal(mine[1].weight, expected) and not torch.equal(mine[0].weight, expected)
            scheme.send()
            assert torch.equal(mine[0].weight, expected) and torch.equal(net.weight, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_between_devices():
    net, mine = torch.nn.Linear(3, 2).cuda(), [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).cuda()]
    scheme = scheme_for(2, net)
    with local_receivers(scheme, mine, "policy"):
        assert all(torch.equal(model.weight.cpu(), net.weight.cpu()) for model in mine)


def test_a_receiver_without_a_model_gets_arrays():
    scheme = scheme_for(1, torch.nn.Linear(3, 2))
    with local_receivers(scheme, [None], "policy") as (receiver,):
        assert {name: a.shape for name, a in receiver.model.items()} == {"weight": (2, 3), "bias": (2,)}


DIFFERENT = {
    r"'layer\.w'.*\(2, 2\)": {"layer": {"w": np.zeros((2, 2), "f4"), "b": np.zeros(4)}},
    r"'layer\.b'.*float32": {"layer": {"w": np.zeros((30, 4), "f4"), "b": np.zeros(4, "f4")}},
    "'steps': no such array": {"layer": arrays(0.0)["layer"], "none": np.zeros((0, 3))},
    "'more'": {**arrays(0.0), "more": np.zeros(1)},
}


@pytest.mark.parametrize("text", DIFFERENT)
def test_a_model_that_differs_is_named_on_both_sides(text):
    scheme = scheme_for(1, timeout=5)
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(model_id="policy", worker_idx=0, model=copy.deepcopy(DIFFERENT[text]))
    found = []
    thread = threading.Thread(target=keep_error, args=(receiver.connect, found))
    thread.start()
    with pytest.raises(WorkerError, match=text) as caught:
        scheme.connect()
    thread.join()
    assert caught.value.worker == 0 and isinstance(found[0], WeightsError) and re.search(text, str(found[0]))
    receiver.shutdown()
    scheme.shutdown()


@pytest.mark.parametrize("text", DIFFERENT)
def test_weights_that_differ_are_not_sent(text):
    scheme, mine = scheme_for(1), arrays(0.0)
    with local_receivers(scheme, [mine], "policy"):
        with pytest.raises(WeightsError, match=text):
            scheme.send(DIFFERENT[text])
        assert scheme.versions == {0: 1} and scheme.send() == 2


@pytest.mark.parametrize(
    "given, text",
    [({"worker_idx": 7}, "the workers 0 to 1"), ({"worker_idx": 0, "model_id": "other"}, "'other'")],
    ids=["index", "model_id"],
)
def test_a_receiver_that_was_never_registered(given, text):
    scheme = scheme_for(2, sync=False)
    scheme.connect()
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(**{"model_id": "policy", "model": arrays(0.0), **given})
    with pytest.raises(UsageError, match=text):
        receiver.connect()
    scheme.shutdown()


def test_two_receivers_of_one_index():
    scheme = scheme_for(1)
    with local_receivers(scheme, [arrays(0.0)], "policy"):
        other = pickle.loads(pickle.dumps(scheme))
        other.init_on_receiver(model_id="policy", worker_idx=0, model=arrays(0.0))
        with pytest.raises(UsageError, match="that worker already"):
            other.connect()


# ---- processes


@pytest.mark.parametrize("method, n", [("fork", 1), ("fork", 2), ("fork", 3), ("fork", 4), ("spawn", 2)])
def test_processes(start, method, n):
    model = arrays(1.0)
    scheme = scheme_for(n, model)
    pipes = [start(follow, scheme, k, 4, method=method)[1] for k in range(n)]
    scheme.connect()
    assert [pipe.recv() for pipe in pipes] == [("connected", 1, 1.0)] * n
    for value in (2.0, 3.0):
        model["layer"]["w"].fill(value)
        scheme.send()
    assert scheme.versions == dict.fromkeys(range(n), 3)
    scheme.send(arrays(9.0))
    assert [pipe.recv() for pipe in pipes] == [("done", 4, 9.0)] * n
    scheme.shutdown()


def test_send_to_some(start):
    model = arrays(1.0)
    scheme = scheme_for(3, model)
    last = [2, 4, 4]
    pipes = [start(follow, scheme, k, last[k])[1] for k in range(3)]
    scheme.connect()
    for worker_ids, value in [(0, 2.0), ([1], 3.0), ([1, 2], 4.0)]:
        scheme.send(arrays(value), worker_ids)
    assert [pipe.recv() and pipe.recv() for pipe in pipes] == [("done", 2, 2.0), ("done", 4, 4.0), ("done", 4, 4.0)]
    with pytest.raises(UsageError, match="no worker 3"):
        scheme.send(worker_ids=3)
    scheme.shutdown()


def test_two_models(start):
    schemes = [MultiProcessWeightSyncScheme(timeout=TIMEOUT) for _ in range(2)]
    models = [arrays(1.0), {"v": np.arange(3.0)}]
    for i, (scheme, model) in enumerate(zip(schemes, models)):
        scheme.init_on_sender(model_id=f"model {i}", model=model, num_workers=2)
    pipes = [start(follow_two, schemes, k)[1] for k in range(2)]
    for scheme in schemes:
        scheme.connect()
    models[0]["layer"]["w"] += 1
    models[1]["v"] += 1
    for scheme in schemes:
        scheme.send()
    assert [pipe.recv() for pipe in pipes] == [[2.0, [1.0, 2.0, 3.0]]] * 2
    for scheme in schemes:
        scheme.shutdown()


def test_one_that_starts_late_and_one_that_ends_early(start):
    scheme = scheme_for(2)
    late = start(follow, scheme, 0, 3, 1.0, 0.2)  # it leaves while its thread is in on_update
    early = start(follow, scheme, 1, 1)
    scheme.connect()
    early[0].join(20)
    scheme.send()
    assert scheme.send() == 3 and scheme.versions[0] == 3
    late[0].join(20)
    wait_for(lambda: scheme.versions and all(w.state is State.LEFT for w in scheme._sender.workers.values()))
    with pytest.raises(WorkerLeftError, match="worker 0: it has shut down"):
        scheme.send()
    with pytest.raises(WorkerLeftError, match="worker 1"):
        scheme.send(worker_ids=1)
    scheme.shutdown()


def test_one_that_comes_after_connect_gets_the_newest(start):
    scheme = scheme_for(1, sync=False)
    scheme.connect()
    scheme.send(arrays(5.0))
    _, pipe = start(follow, scheme, 0, 2)
    assert pipe.recv() == ("connected", 2, 5.0)
    scheme.wait_async()
    scheme.shutdown()


def test_a_late_worker_gets_what_was_sent_to_it():
    scheme, models = scheme_for(2, sync=False), [arrays(0.0), arrays(0.0)]
    receivers = [pickle.loads(pickle.dumps(scheme)) for _ in models]
    for k, receiver in enumerate(receivers):
        receiver.init_on_receiver(model_id="policy", worker_idx=k, model=models[k])
    scheme.connect()
    receivers[0].connect()
    for value in (2.0, 3.0):
        scheme.send(arrays(value))
    for value in (4.0, 5.0):
        scheme.send(arrays(value), 0)
        wait_for(lambda: scheme.versions[0] == scheme.version)
    receivers[1].connect()
    scheme.wait_async()
    assert scheme.versions == {0: 5, 1: 3} and (models[1]["layer"]["w"] == 3).all()
    for each in (*receivers, scheme):
        each.shutdown()


@pytest.mark.parametrize("on_dead", ["raise", "drop"])
def test_a_worker_that_dies(start, on_dead):
    scheme = scheme_for(2, on_dead=on_dead, timeout=None)
    victim, to_victim = start(die, scheme, 0, "connect")
    _, pipe = start(follow, scheme, 1, 3)
    scheme.connect()
    to_victim.recv()
    to_victim.send("now")
    if on_dead == "raise":
        with pytest.raises(WorkerLeftError, match=rf"worker 0: its process \({victim.pid}\) ended"):
            victim.join()
            scheme.send()
        scheme.send(worker_ids=1)
    else:
        victim.join()
        scheme.send()
        scheme.send(worker_ids=[0, 1])
    if scheme.version < 3:
        scheme.send(worker_ids=1)
    pipe.recv()
    assert pipe.recv()[1] == 3
    scheme.shutdown()


def test_a_worker_that_is_killed_while_the_sender_waits(start):
    scheme = scheme_for(1, timeout=None)
    victim, to_victim = start(die, scheme, 0, "connect")
    scheme.connect()
    to_victim.recv()
    os.kill(victim.pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(victim.pid))
    threading.Timer(0.3, os.kill, (victim.pid, signal.SIGKILL)).start()
    with pytest.raises(WorkerLeftError, match="worker 0"):
        scheme.send()
    scheme.shutdown()


def test_a_worker_that_dies_after_its_answer_has_what_was_sent(start):
    scheme = scheme_for(2)
    victim, _ = start(die, scheme, 0, "version 2")
    slow, _ = start(follow, scheme, 1, 2)
    scheme.connect()
    os.kill(slow.pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(slow.pid))
    scheme.send_async()
    resume = threading.Thread(target=lambda: (victim.join(), time.sleep(0.3), os.kill(slow.pid, signal.SIGCONT)))
    resume.start()
    scheme.wait_async()  # worker 0 dies meanwhile
    resume.join()
    with pytest.raises(WorkerLeftError, match="worker 0"):
        scheme.send()
    scheme.shutdown()


@pytest.mark.slow
def test_a_worker_that_dies_before_it_connects(start):
    scheme = scheme_for(2, timeout=None)
    start(follow, scheme, 1, 1)
    start(die, scheme, 0, "start")
    with pytest.raises(WorkerLeftError, match=r"worker 0: it has not connected.*status 3"):
        scheme.connect()
    scheme.shutdown()


def test_a_worker_that_has_died_before_the_sender_connects(start):
    scheme = scheme_for(1, timeout=None)
    start(die, scheme, 0, "start")[0].join()
    with pytest.raises(WorkerLeftError, match=r"worker 0: it has not connected.*status 3"):
        scheme.connect()
    scheme.shutdown()


def test_a_sender_that_dies(start):
    ours, theirs = multiprocessing.Pipe()
    start(send_and_die, theirs, at=0)
    assert ours.recv() == "connected"
    assert "has ended without shutdown" in ours.recv()


def test_an_idle_receiver_costs_nothing(start):
    scheme = scheme_for(1)
    _, pipe = start(idle, scheme, 0)
    scheme.connect()
    assert pipe.recv() <= 0.01
    scheme.shutdown()


# ---- waiting


def test_a_timeout_names_who_has_not_answered():
    scheme = scheme_for(2, timeout=0.3)
    with pytest.raises(TimeoutError, match="worker 0 has not connected; worker 1 has not connected"):
        scheme.connect()
    scheme.shutdown()
    scheme = scheme_for(2)
    with local_receivers(scheme, [arrays(0.0), arrays(0.0)], "policy") as (quick, slow):
        with slow.frozen(), pytest.raises(TimeoutError, match=r"within 0\.2 s: worker 1 has version 1$"):
            scheme.send(timeout=0.2)
        assert quick.version == 2
        scheme.wait_async()
        assert slow.version == 2


def test_the_latest_wins():
    scheme, mine = scheme_for(1), arrays(0.0)
    with local_receivers(scheme, [mine], "policy", background=False) as (receiver,):
        for value in (2.0, 3.0, 4.0):
            scheme.send_async(arrays(value))
        assert receiver.receive() == 4 and (mine["layer"]["w"] == 4).all()
        assert receiver.receive(timeout=0) is None
        scheme.wait_async()
        assert scheme.versions == {0: 4}


def test_a_slow_one_gets_the_newest_of_hundreds_in_two_sections():
    scheme, mine = scheme_for(1), arrays(0.0)
    with local_receivers(scheme, [mine], "policy", background=False) as (receiver,):
        apply, begun, go_on = receiver._receiver._apply, threading.Event(), threading.Event()
        receiver._receiver._apply = lambda *args: (begun.set(), go_on.wait(), apply(*args))
        scheme.send_async()
        reading = threading.Thread(target=receiver.receive)
        reading.start()
        begun.wait()
        for _ in range(100):  # in another section, as the first is being read
            scheme.send_async(arrays(5.0))
        go_on.set()
        reading.join()
        for _ in range(100):  # in the first, of which it has not been told
            scheme.send_async(arrays(6.0))
        while receiver.version < 202:
            assert receiver.receive(5) is not None
            assert scheme.versions
        assert (mine["layer"]["w"] == 6).all() and len(scheme._sender.publisher._sections) == 2


def test_frozen_weights_stay_as_they_are():
    scheme, mine = scheme_for(1), arrays(0.0)
    with local_receivers(scheme, [mine], "policy") as (receiver,):
        with receiver.frozen() as version, receiver.frozen():
            scheme.send_async(arrays(3.0))
            time.sleep(0.05)
            assert version == 1 and (mine["layer"]["w"] == 1).all()
        wait_for(lambda: receiver.version == 2)
        assert (mine["layer"]["w"] == 3).all()
        with receiver.frozen(), pytest.raises(UsageError, match="inside frozen"):
            receiver.model = arrays(4.0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True], ids=["copied", "shared"])
def test_ten_thousand_sends_and_no_mixed_version(share):
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    mine, ended, looks = copy.deepcopy(net), threading.Event(), []
    tensors = list(net.parameters())
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(1.0)
    scheme = scheme_for(1, net, timeout=None)
    with local_receivers(scheme, [mine], "policy", zero_copy=share) as (receiver,):

        def look():
            while not ended.is_set():
                with receiver.frozen() as version:
                    values = {float(part.detach()[..., i].flatten()[0]) for part in mine.parameters() for i in (0, -1)}
                    looks.append(values == {float(version)})

        reader = threading.Thread(target=look)
        reader.start()
        arrays_of = [tensor.detach().numpy() for tensor in tensors]
        for version in range(2, 10_002):
            for array in arrays_of:
                array.fill(version)
            scheme.send() if version % 10 == 0 else scheme.send_async()
        scheme.wait_async()
        ended.set()
        reader.join()
    assert receiver.version == 10_001 and len(looks) > 20 and all(looks)


def test_whole_or_not_at_all(monkeypatch):
    class Failing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(torch.zeros(3, 2).T)  # not contiguous: written by torch
            self.second = torch.nn.Parameter(torch.zeros(3, 2).T)
            self.third = torch.nn.Parameter(torch.zeros(4))

    net, mine = Failing(), Failing()
    scheme = scheme_for(1, net)
    with local_receivers(scheme, [mine], "policy") as (receiver,):
        from mpi_util.arrays.adapters import pytorch

        slots = pytorch.slots
        first, second, third = slots(mine)
        broken = [first, second._replace(write=fail), third]
        monkeypatch.setattr(pytorch, "slots", lambda model: broken if model is mine else slots(model))
        with torch.no_grad():
            for tensor in net.parameters():
                tensor.fill_(1.0)
        with pytest.raises(WorkerError, match="the device is on fire") as caught:
            scheme.send()
        assert caught.value.worker == 0 and "in fail" in caught.value.traceback
        assert receiver.version == 1 and not any(tensor.any() for tensor in mine.parameters())
        monkeypatch.undo()
        assert scheme.send() == 3 and receiver.version == 3 and mine.second.all()


def fail(values):
    if values.any():
        raise RuntimeError("the device is on fire")


def test_an_error_of_one_worker_spares_the_others():
    models = [arrays(0.0) for _ in range(3)]
    scheme = scheme_for(3)
    with local_receivers(scheme, models, "policy") as receivers:
        models[1]["layer"]["b"] = np.zeros(5)  # changed behind the scheme's back
        with pytest.raises(WorkerError, match=r"worker 1 could not take version 2:[\s\S]*layer\.b"):
            scheme.send(arrays(2.0))
        assert [receiver.version for receiver in receivers] == [2, 1, 2]
        assert (models[1]["layer"]["w"] == 1).all()
        wait_for(lambda: isinstance(receivers[1].failure, WeightsError))
        scheme.send_async(arrays(3.0))
        wait_for(lambda: scheme.versions == {0: 3, 1: 1, 2: 3} and scheme._sender.publisher.failures)
        with pytest.raises(WorkerError, match="worker 1"):
            scheme.send_async()
        assert scheme.version == 3


def test_an_update_that_comes_again_is_not_applied_again():
    scheme, mine, applied = scheme_for(1), arrays(0.0), []
    with local_receivers(scheme, [mine], "policy", on_update=applied.append):
        scheme.send(arrays(2.0))
        publisher, worker = scheme._sender.publisher, scheme._sender.workers[0]
        for section in publisher._sections:
            publisher._send(worker, section)
        assert scheme.send(arrays(3.0)) == 3 and applied == [1, 2, 3]


def test_an_interrupted_version_is_not_used_again(monkeypatch):
    scheme, mine = scheme_for(2), [arrays(0.0), arrays(0.0)]
    with local_receivers(scheme, mine, "policy") as receivers:
        publisher, send = scheme._sender.publisher, scheme._sender.publisher._send

        def interrupted(worker, *arguments):
            send(worker, *arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(publisher, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheme.send(arrays(2.0))
        monkeypatch.undo()
        wait_for(lambda: receivers[0].version == 2)
        assert scheme.send(arrays(3.0)) == 3
        assert all((model["layer"]["w"] == 3).all() for model in mine)


# ---- the end


@pytest.mark.parametrize("state", ["new", "sender", "connected", "receiver", "waiting", "frozen"])
def test_shutdown_in_every_state(state):
    with contextlib.ExitStack() as stack:
        scheme = MultiProcessWeightSyncScheme(timeout=None)
        if state != "new":
            scheme.init_on_sender(model=arrays(0.0), num_workers=1)
        closing = [scheme]
        if state in ("connected", "frozen"):
            (receiver,) = stack.enter_context(local_receivers(scheme, [arrays(0.0)]))
            closing = [receiver, scheme] if state == "frozen" else [scheme, receiver]
            if state == "frozen":
                stack.enter_context(receiver.frozen())
                scheme.send_async()
                time.sleep(0.02)
        elif state in ("receiver", "waiting"):
            receiver = pickle.loads(pickle.dumps(scheme))
            receiver.init_on_receiver(worker_idx=0, model=arrays(0.0))
            closing = [receiver, scheme]
            if state == "waiting":
                thread = threading.Thread(target=keep_error, args=(receiver.connect, []))
                thread.start()
                time.sleep(0.05)
        begin = time.perf_counter()
        for each in closing * 2:
            each.shutdown()
        if state == "waiting":
            thread.join(5)
            assert not thread.is_alive()
        assert time.perf_counter() - begin < 3


def test_a_receiver_whose_sender_shuts_down_ends_its_wait():
    scheme, got = scheme_for(1), []
    with local_receivers(scheme, [arrays(0.0)], "policy", background=False) as (receiver,):
        thread = threading.Thread(target=lambda: got.append(receiver.receive()))
        thread.start()
        time.sleep(0.02)
        scheme.shutdown()
        thread.join(5)
        assert got == [None]


def test_a_writer_gets_in_between_readers_that_hardly_pause():
    lock, ended, changes = ReadersWriterLock(), threading.Event(), 0

    def read():
        while not ended.is_set():
            with lock.reading():
                pass

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    end = time.perf_counter() + 5
    while changes < 50 and time.perf_counter() < end:
        with lock.writing():
            changes += 1
    ended.set()
    for reader in readers:
        reader.join()
    assert changes == 50


def test_no_reader_sees_half_a_change_when_the_lock_is_closed():
    lock, seen = ReadersWriterLock(), []

    def read():
        with lock.reading():
            seen.append("read")

    with lock.writing():
        lock.close(1)
        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.05)
        seen.append("changed")
    reader.join()
    assert seen == ["changed", "read"]


def test_a_returned_section_is_not_read_from_its_successor():
    first = Section(1000)
    ticket = first.ticket
    first.close()
    second = Section(1000)
    reader = Reader()
    with pytest.raises(WorkerLeftError, match="shut down"), reader.reading(ticket._replace(fd=second.ticket.fd)):
        pass
    second.close()
    with pytest.raises(WorkerLeftError, match="shut down"), Reader().reading(ticket._replace(fd=9999)):
        pass
    reader.keep(())


@pytest.mark.parametrize("noticed", [True, False])
def test_another_process_may_take_the_place_of_one_that_died(start, noticed):
    scheme = scheme_for(1)
    victim, pipe = start(die, scheme, 0, "connected")
    scheme.connect()
    pipe.recv()
    pipe.send("die")
    victim.join()
    if noticed:
        with pytest.raises(WorkerLeftError):
            scheme.send()
    mine = arrays(0.0)
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(model_id="policy", worker_idx=0, model=mine)
    coming = threading.Thread(target=receiver.connect)
    coming.start()
    wait_for(lambda: scheme._sender.workers[0].state is State.ABSENT)  # it has connected
    scheme.send(arrays(5.0))
    coming.join()
    assert (mine["layer"]["w"] == 5).all()
    receiver.shutdown()
    scheme.shutdown()


def test_the_timeout_holds_where_each_worker_gets_its_own():
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", params_map={0: arrays(1.0), 1: arrays(2.0)})
    models = [arrays(0.0), arrays(0.0)]
    with local_receivers(scheme, models, "policy") as (first, _):
        with first.frozen():
            began = time.perf_counter()
            with pytest.raises(SyncTimeoutError, match="worker 0"):
                scheme.send(timeout=0.2)
            assert time.perf_counter() - began < 2
        scheme.wait_async(TIMEOUT)


def test_one_thread_may_send_while_another_looks_at_the_versions():
    scheme, ended, errors = scheme_for(1), threading.Event(), []

    def look():
        while not ended.is_set():
            try:
                assert scheme.versions
            except Exception as error:
                errors.append(error)

    with local_receivers(scheme, [arrays(0.0)], "policy"):
        looker = threading.Thread(target=look)
        looker.start()
        for _ in range(60):
            scheme.send()
        ended.set()
        looker.join()
    assert not errors


def test_a_replaced_layer_is_noticed():
    net, mine = (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()) for _ in range(2))
    with local_receivers(scheme := scheme_for(1, net), [mine], "policy"):
        net[0] = torch.nn.Linear(3, 2)
        scheme.send()
        assert torch.equal(mine[0].weight, net[0].weight)


@pytest.mark.parametrize("weights", [torch.nn.ParameterList, lambda parts: {str(i): p for i, p in enumerate(parts)}])
def test_numbers_that_are_names_count_more_than_an_order(weights):
    net, mine = (torch.nn.ParameterList([torch.full((2,), float(i) * k) for i in range(12)]) for k in (1, 0))
    with local_receivers(scheme := scheme_for(1, weights([*net])), [mine], "policy"):
        scheme.send(net.state_dict())  # in which "10" comes after "9", or before "2"
        assert [int(p[0]) for p in mine] == [*range(12)]


@pytest.mark.parametrize("mine", [[np.zeros(1) for _ in range(12)], {str(i): np.zeros(1) for i in range(12)}], ids=type)
def test_numbers_get_the_values_of_numbered_names_in_their_order(mine):
    net = torch.nn.Module()
    net.p = torch.nn.ParameterList([torch.full((1,), float(i)).double() for i in range(12)])
    for sent in (net, net.state_dict()):  # in which "p.10" comes after "p.9", or before "p.2"
        for array in mine if isinstance(mine, list) else mine.values():
            array[:] = -1
        with local_receivers(scheme_for(1, sent), [mine], "policy"):
            assert [float(mine[i if isinstance(mine, list) else str(i)][0]) for i in range(12)] == [*range(12)]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_model_that_replaces_another_is_compared(zero_copy):
    net, mine = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with local_receivers(scheme := scheme_for(1, net), [mine], "policy", zero_copy=zero_copy) as (receiver,):
        for other in (
            torch.nn.Linear(5, 4),
            torch.nn.Linear(3, 2).double(),
            torch.nn.Sequential(torch.nn.Linear(3, 2)),
        ):
            with pytest.raises(WeightsError, match="differ, first at"):
                receiver.model = other
        receiver.model = another = torch.nn.Linear(3, 2)
        scheme.send()
        assert torch.equal(another.weight, net.weight)


def test_without_workers_versions_count_too():
    scheme = scheme_for(0)
    scheme.connect()
    assert [scheme.send(), scheme.send()] == [2, 3] and scheme.version == 3
    scheme.shutdown()


def test_an_end_in_order_is_no_death():
    scheme = scheme_for(1, torch.nn.Linear(3, 2))
    own = {"zero_copy": True, "background": False}
    with local_receivers(scheme, [torch.nn.Linear(3, 2)], "policy", **own) as (receiver,):
        scheme.send_async()  # into memory that the receiver has not opened yet
        scheme.shutdown()
        assert receiver.receive(timeout=5) is None and receiver.ended and receiver.failure is None


def test_a_worker_index_is_a_whole_number():
    scheme = scheme_for(1)
    for given in (1.0, "0", -1):
        with pytest.raises(UsageError, match="worker_idx is a whole number of at least 0"):
            copy.copy(scheme).init_on_receiver(model_id="policy", worker_idx=given, model=arrays(0.0))
    scheme.shutdown()


def test_two_arrays_of_one_name():
    with pytest.raises(WeightsError, match=r"two arrays whose path is 'a\.b'"):
        Weights.of({"a": {"b": np.zeros(2)}, "a.b": np.ones(2)})


def test_a_worker_that_reads_slowly_delays_no_other_call(start):
    model = {f"{i} {'long name ' * 500}": np.zeros(1) for i in range(400)}  # 2 MB of names, and little to compute
    scheme = scheme_for(1, model, timeout=1)
    scheme._sender.publisher.open()
    process, pipe = start(stop_before_reading, scheme, 0)
    try:
        pipe.recv()
        wait_for(lambda: is_stopped(process.pid))
        began = time.perf_counter()
        with pytest.raises((WorkerLeftError, SyncTimeoutError)):
            scheme.connect()
        scheme.shutdown()
        assert time.perf_counter() - began < 10
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_large_layout_arrives():
    model = {f"{i} {'long name ' * 500}": np.full(1, i, "f4") for i in range(400)}
    scheme, mine = scheme_for(1, model), {name: np.zeros(1, "f4") for name in model}
    with local_receivers(scheme, [mine], "policy"):
        assert mine == model


def test_a_long_traceback_arrives_without_its_beginning():
    def fail_at_length(version):
        raise RuntimeError("long " * 40_000 + "end")

    scheme = scheme_for(1)
    with local_receivers(scheme, [arrays(0.0)], "policy", background=False) as (receiver,):
        receiver._receiver._on_update = fail_at_length
        scheme.send_async()
        with pytest.raises(RuntimeError):
            receiver.receive()
        with pytest.raises(WorkerError, match=r"could not take version 2:\n.*long end"):
            scheme.wait_async()


def test_a_worker_that_leaves_with_unread_updates_has_not_died():
    """The kernel reports a reset before the last messages of such a worker."""
    scheme = scheme_for(2)
    with local_receivers(scheme, [arrays(0.0), arrays(0.0)], "policy", background=False) as (first, second):
        scheme.send_async()
        first.shutdown()
        assert second.receive() == 2
        scheme.wait_async()
        assert [worker.state for worker in scheme._sender.workers.values()] == [State.LEFT, State.READY]


def test_a_worker_that_leaves_during_an_update_has_not_died(monkeypatch):
    scheme = scheme_for(2)
    with local_receivers(scheme, [arrays(0.0), arrays(0.0)], "policy", background=False) as (first, second):
        publisher = scheme._sender.publisher
        claim = publisher._claim
        monkeypatch.setattr(publisher, "_claim", lambda *args: (first.shutdown(), claim(*args))[1])
        scheme.send_async()
        assert second.receive() == 2
        scheme.wait_async()
        assert [worker.state for worker in scheme._sender.workers.values()] == [State.LEFT, State.READY]


# ---- MPI, torchrl


@pytest.mark.slow_if(n=4)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ranks(run_ranks, n):
    assert "weight sync: well" in run_ranks("weight_sync.py", n).out


@pytest.mark.slow_if(machines=4)
@pytest.mark.parametrize("machines", [2, 4])
def test_ranks_on_several_machines(run_ranks, machines):
    assert "weight sync: well" in run_ranks("weight_sync.py", 4, env={"MPI_UTIL_MACHINES": str(machines)}).out


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", when="midway")
@pytest.mark.parametrize("when", ["before", "midway", "first"])
def test_a_rank_of_another_machine_that_is_stopped_is_late(run_ranks, when):
    assert "weight sync: well" in run_ranks("weight_sync.py", 3, "stopped", when, env={"MPI_UTIL_MACHINES": "3"}).out


@pytest.mark.slow
def test_a_busy_sender_serves_other_machines_and_sends_the_newest(run_ranks):
    assert "weight sync: well" in run_ranks("weight_sync.py", 2, "busy", env={"MPI_UTIL_MACHINES": "2"}).out


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_any_number_of_schemes_one_after_another(run_ranks):
    """MPICH has room for some 2,000 communicators."""
    assert "well" in run_ranks("weight_sync.py", 2, "many", 2200).out


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", machines=1)
@pytest.mark.parametrize("machines", [1, 3])
def test_a_rank_that_never_connects(run_ranks, machines):
    env = {"MPI_UTIL_MACHINES": str(machines)}
    assert "rank 1 has ended" in run_ranks("weight_sync.py", 3, "gone", 2, status=1, env=env).err


def test_without_torchrl_one_line_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl", None)
    monkeypatch.delitem(sys.modules, "mpi_util_weight_sync.torchrl", raising=False)
    with pytest.raises(MissingFrameworkError, match="pip install torchrl"):
        importlib.import_module("mpi_util_weight_sync.torchrl")


@pytest.mark.torchrl
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_torchrl_collectors(kind):
    from sync_torchrl import collect

    collect(kind)


@pytest.mark.torchrl
@pytest.mark.timeout(300)
@pytest.mark.left_out(mpi="openmpi")  # the collectors' own processes know of no MPI
def test_torchrl_collectors_in_mpi_ranks(run_ranks):
    assert "collected" in run_ranks("weight_sync_torchrl.py", 3, timeout=200).out
