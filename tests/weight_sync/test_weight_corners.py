"""Corners of weight_sync; each test fails where the package is wrong."""

import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch
from sync_workers import arrays, keep_error, local_receivers, wait_for

from mpi_util import UsageError, WeightsError, WorkerError, WorkerLeftError
from mpi_util_weight_sync import MultiProcessWeightSyncScheme
from mpi_util_weight_sync import receiver as receiver_module

TIMEOUT = 20


def scheme_for(n, model=None, **options):
    scheme = MultiProcessWeightSyncScheme(**{"timeout": TIMEOUT, **options})
    scheme.init_on_sender(model_id="policy", model=arrays(1.0) if model is None else model, num_workers=n)
    return scheme


def torchrl_scheme(**options):
    import mpi_util_weight_sync.torchrl  # noqa: F401

    return MultiProcessWeightSyncScheme(**{"timeout": TIMEOUT, **options})


def in_thread(call, limit=10.0):
    """What a call raised in a thread (None: nothing); "hangs" after `limit` seconds."""
    found = []
    thread = threading.Thread(target=keep_error, args=(call, found), daemon=True)
    thread.start()
    thread.join(limit)
    return "hangs" if thread.is_alive() else found[0] if found else None


def value(model):
    return float(model["layer"]["w"][0, 0])


# ---- 1. versions


def test_after_a_race_of_threads_the_last_values_are_in_place():
    """The one whose number is the highest was sent last: its values are the ones that a worker has."""
    scheme, mine = scheme_for(1), arrays(0.0)
    with local_receivers(scheme, [mine], "policy"):
        sent, errors, wrong = {}, [], []

        def work(first):
            for k in range(100):
                sent.setdefault(scheme.send_async(arrays(float(first + k))), []).append(first + k)

        for _ in range(5):
            threads = [threading.Thread(target=keep_error, args=(lambda f=f: work(f), errors)) for f in (1000, 2000)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            scheme.wait_async()
            if value(mine) not in sent[max(sent)] or len(sent[max(sent)]) > 1:
                wrong.append((max(sent), sent[max(sent)], value(mine)))
        assert not errors and not wrong, (errors[:2], wrong)


@pytest.mark.parametrize("after", ["before the send", "before the socket"])
def test_a_send_that_is_interrupted_owes_no_answer(monkeypatch, after):
    """Worker 1 is recorded as told although nothing has been sent to it."""
    scheme, mine = scheme_for(2, timeout=2), [arrays(0.0), arrays(0.0)]
    with local_receivers(scheme, mine, "policy"):
        publisher, worker = scheme._sender.publisher, scheme._sender.workers[1]
        send = publisher._send

        def interrupted(to, *arguments):
            if to is worker:
                raise KeyboardInterrupt
            send(to, *arguments)

        def cut(*_):
            raise KeyboardInterrupt

        if after == "before the send":
            monkeypatch.setattr(publisher, "_send", interrupted)
        else:
            monkeypatch.setattr(worker.connection, "send_update", cut)
        with pytest.raises(KeyboardInterrupt):
            scheme.send(arrays(2.0))
        monkeypatch.undo()
        assert scheme.send(arrays(3.0)) == 3
        assert [value(model) for model in mine] == [3.0, 3.0]


def test_signals_at_random_times_leave_the_versions_right():
    """Interrupts `send` by a real signal at a random place, 150 times; the next send brings its values to all."""
    scheme, mine = scheme_for(2, timeout=5), [arrays(0.0), arrays(0.0)]
    rng, interrupted, used = np.random.default_rng(0), 0, set()

    def handler(*_):
        raise KeyboardInterrupt

    with local_receivers(scheme, mine, "policy"):
        before = signal.signal(signal.SIGALRM, handler)
        try:
            for k in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(2e-5, 8e-4)))
                    scheme.send(arrays(float(2 * k + 2)))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                try:
                    version = scheme.send(arrays(float(2 * k + 3)))
                except WorkerError:  # what was overwritten
                    version = scheme.send(arrays(float(2 * k + 3)))
                assert version not in used
                used.add(version)
                assert [value(model) for model in mine] == [2 * k + 3] * 2, (k, version)
                assert set(scheme.versions.values()) == {version}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert interrupted > 20


def test_a_newer_version_may_come_between_two_workers(monkeypatch):
    """A thread sends version 3 to worker 0 after another one has sent it version 2, which worker 1 is yet to get."""
    scheme = MultiProcessWeightSyncScheme(timeout=TIMEOUT)
    scheme.init_on_sender(model_id="policy", params_map={0: arrays(1.0), 1: arrays(1.0)})
    with local_receivers(scheme, [arrays(0.0), arrays(0.0)], "policy") as (first, _):
        publisher = scheme._sender.publisher
        publish = publisher.publish

        def published(*arguments):
            version = publish(*arguments)
            monkeypatch.undo()
            scheme.send_async({0: arrays(3.0)})
            return version

        monkeypatch.setattr(publisher, "publish", published)
        with first.frozen():  # its answers come last
            scheme.send_async({0: arrays(2.0), 1: arrays(2.0)})
        scheme.wait_async()
        assert scheme.versions == {0: 3, 1: 2} and scheme.version == 3


# ---- 2. a sender that is killed while a process forked from it lives


def killed_while_writing(theirs, forked):
    scheme = MultiProcessWeightSyncScheme(timeout=TIMEOUT)
    scheme.init_on_sender(model_id="policy", model=arrays(1.0), num_workers=1)
    theirs.send(scheme)
    scheme.connect()
    scheme.send_async(arrays(2.0))
    if forked and os.fork() == 0:
        time.sleep(8)
        os._exit(0)
    publisher = scheme._sender.publisher
    claim = publisher._claim
    publisher._claim = lambda *args: (claim(*args), os.kill(os.getpid(), signal.SIGKILL))
    theirs.send("now")
    scheme.send_async(arrays(3.0))


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
def test_a_sender_that_is_killed_while_it_writes_keeps_no_worker(forked):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=killed_while_writing, args=(theirs, forked))
    process.start()
    receiver = ours.recv()
    mine = arrays(0.0)
    receiver.init_on_receiver(model_id="policy", worker_idx=0, model=mine)
    receiver.connect(background=False)
    assert ours.recv() == "now"
    process.join()
    found = in_thread(lambda: receiver.receive(timeout=1), 5)
    assert found != "hangs"
    assert isinstance(found, (WorkerLeftError, WeightsError)), found
    receiver.shutdown()


# ---- 3. the arguments of phase 1


@pytest.mark.torchrl
def test_params_map_by_torchrl_without_model_id():
    import tensordict

    nets, mine = [torch.nn.Linear(3, 2) for _ in range(2)], [torch.nn.Linear(3, 2) for _ in range(2)]
    scheme = torchrl_scheme(sync=False, timeout=5)
    scheme.init_on_sender(params_map={k: tensordict.TensorDict.from_module(net).data for k, net in enumerate(nets)})
    scheme.connect()
    receivers = [pickle.loads(pickle.dumps(scheme)) for _ in mine]
    try:
        for k, (receiver, net) in enumerate(zip(receivers, mine)):
            receiver.init_on_receiver(model_id="policy", worker_idx=k, model=net)
            receiver.connect()
            assert torch.equal(net.weight, nets[k].weight)
    finally:
        for each in (*receivers, scheme):
            each.shutdown()


@contextlib.contextmanager
def torchrl_pair(scheme, models, model_id="policy"):
    receivers = [pickle.loads(pickle.dumps(scheme)) for _ in models]
    threads = []
    for k, (receiver, net) in enumerate(zip(receivers, models)):
        receiver.init_on_receiver(model_id=model_id, worker_idx=k, model=net)
        threads.append(threading.Thread(target=receiver.connect))
        threads[-1].start()
    try:
        scheme.connect()
        for thread in threads:
            thread.join()
        yield receivers
    finally:
        for each in (*receivers, scheme):
            each.shutdown()


@pytest.mark.torchrl
def test_weights_of_each_worker_by_torchrl():
    """collector.update_policy_weights_({0: ..., 1: ...}) calls scheme.send with that."""
    import tensordict

    nets, mine = [torch.nn.Linear(3, 2) for _ in range(2)], [torch.nn.Linear(3, 2) for _ in range(2)]
    own = {k: tensordict.TensorDict.from_module(net).data for k, net in enumerate(nets)}
    scheme = torchrl_scheme()
    scheme.init_on_sender(model_id="policy", params_map={k: w.clone().zero_() for k, w in own.items()})
    with torchrl_pair(scheme, mine):
        scheme.send(own)
        assert all(torch.equal(a.weight, b.weight) for a, b in zip(mine, nets))
        scheme.send({1: own[0]})
        assert torch.equal(mine[1].weight, nets[0].weight) and scheme.versions == {0: 2, 1: 3}


@pytest.mark.torchrl
def test_a_torchrl_policy_without_weights_is_refused():
    scheme = torchrl_scheme(per_worker_weights=True)
    from torchrl.collectors import MultiSyncCollector, RandomPolicy
    from torchrl.envs import GymEnv

    make_env = functools.partial(GymEnv, "Pendulum-v1")
    policy = functools.partial(RandomPolicy, make_env().action_spec)
    with pytest.raises(TypeError, match="a RandomPolicy has no weights to send"):
        MultiSyncCollector(
            [make_env], policy_factory=policy, frames_per_batch=10, weight_sync_schemes={"policy": scheme}
        )


# ---- 4. two schemes between machines


@pytest.mark.slow
@pytest.mark.parametrize("form", ["same sender", "both ways", "one, then a collective"])
@pytest.mark.parametrize("machines", [1, 2])
def test_two_schemes_without_sync(run_ranks, machines, form):
    env = {"MPI_UTIL_MACHINES": str(machines)} if machines > 1 else {}
    assert "well" in run_ranks("weight_corners.py", 2, form, env=env, timeout=15).out


# ---- 5. extra state


class Extra(torch.nn.Module):
    def __init__(self, state):
        super().__init__()
        self.layer, self.state = torch.nn.Linear(2, 1), state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("what", ["model", "state_dict"])
def test_extra_state_stays_where_it_is_and_is_named(what):
    net, mine = Extra("the sender's"), Extra("the worker's")
    named = pytest.warns(UserWarning, match="'policy': parameters and buffers are sent, but '_extra_state' is not$")
    with named as found, local_receivers(scheme := scheme_for(1, net), [mine], "policy"):
        scheme.send(net if what == "model" else net.state_dict())
        assert torch.equal(mine.layer.weight, net.layer.weight) and mine.state == "the worker's"
    assert found[-1].filename == __file__  # it shows the call of `send`


# ---- 6. refusals, and the end


@pytest.mark.parametrize(
    "given, text", [({"model_id": "other"}, "other"), ({"worker_idx": 7}, "worker 7|num_workers")], ids=["id", "index"]
)
def test_a_refusal_reaches_the_sender_at_once(given, text):
    scheme = scheme_for(1, timeout=6)
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(**{"model_id": "policy", "worker_idx": 0, "model": arrays(0.0), **given})
    found = []
    thread = threading.Thread(target=keep_error, args=(receiver.connect, found))
    thread.start()
    began = time.perf_counter()
    with pytest.raises((UsageError, WorkerError), match=text):
        scheme.connect()
    took = time.perf_counter() - began
    thread.join()
    receiver.shutdown()
    scheme.shutdown()
    assert isinstance(found[0], UsageError) and took < 3, took


def test_a_process_forked_from_the_senders_sends_nothing():
    scheme = scheme_for(1, arrays(1.0))
    with local_receivers(scheme, [model := arrays(0.0)], "policy"):
        reader, writer = multiprocessing.get_context("fork").Pipe(False)

        def child() -> None:
            try:
                scheme.send(arrays(-1.0))
            except UsageError as error:
                writer.send(str(error))

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        assert reader.poll(10.0) and "forked from the sender's" in reader.recv()
        process.join(10.0)
        assert value(model) == 1.0 and scheme.send(arrays(2.0)) == 2 and value(model) == 2.0
    scheme.shutdown()


@pytest.mark.parametrize("background", [True, False])
def test_a_loop_of_a_worker_ends_with_its_sender(background):
    """The one of docs/weight_sync.md, with fewer versions than it waits for; receive() in a loop."""
    scheme = scheme_for(1)
    with local_receivers(scheme, [arrays(0.0)], "policy", background=background) as (receiver,):

        def loop():
            while receiver.version < 10 and not receiver.ended:
                if background:
                    with receiver.frozen():
                        time.sleep(0.01)
                else:
                    receiver.receive(timeout=0.1)

        thread = threading.Thread(target=keep_error, args=(loop, []), daemon=True)
        thread.start()
        scheme.shutdown()
        thread.join(3)
        assert not thread.is_alive(), "nothing tells it"


# ---- 7. locks and ends


def test_a_thread_started_inside_frozen_may_enter_too():
    scheme, mine = scheme_for(1), arrays(0.0)
    with local_receivers(scheme, [mine], "policy") as (receiver,):
        entered, versions = threading.Event(), []

        def inner():
            with receiver.frozen() as version:
                versions.append(version)
                entered.set()

        thread = threading.Thread(target=inner, daemon=True)
        with receiver.frozen() as version:
            scheme.send_async(arrays(2.0))
            wait_for(lambda: receiver._receiver.lock._waiting, 5)  # the writer waits
            thread.start()
            inside = entered.wait(3)
        thread.join(5)
        assert inside, "it waits for the writer, which waits for the one that would wait for it"
        assert versions == [version]


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_an_on_update_that_raises_leaves_both_sides_agreed(first):
    scheme, mine, fail = scheme_for(1, timeout=5), arrays(0.0), [first]

    def on_update(version):
        if fail[0]:
            fail[0] = False
            raise RuntimeError("on_update failed")

    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(model_id="policy", worker_idx=0, model=mine, on_update=on_update)
    found = []
    thread = threading.Thread(target=keep_error, args=(receiver.connect, found))
    thread.start()
    if first:
        with pytest.raises(WorkerError, match="on_update failed"):
            scheme.connect()
    else:
        scheme.connect()
    thread.join()
    if not first:
        fail[0] = True
        with pytest.raises(WorkerError, match="on_update failed"):
            scheme.send(arrays(2.0))
    print(found, scheme.versions, receiver.version, value(mine))
    try:
        assert scheme.versions[0] == receiver.version, (scheme.versions, receiver.version, value(mine))
    finally:
        receiver.shutdown()
        scheme.shutdown()


@pytest.mark.parametrize("why", ["on_update", "model"])
def test_a_worker_whose_connect_failed_may_try_again(why):
    scheme, fail = scheme_for(1, timeout=5), [True]
    mine = {} if why == "model" else arrays(0.0)

    def on_update(version):
        if why == "on_update" and fail and fail.pop():
            raise RuntimeError("on_update failed")

    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(
        model_id="policy", worker_idx=0, model={"x": np.zeros(1)} if why == "model" else mine, on_update=on_update
    )
    found = []
    thread = threading.Thread(target=keep_error, args=(receiver.connect, found))
    thread.start()
    with pytest.raises(WorkerError):
        scheme.connect()
    thread.join()
    try:
        receiver._receiver.model.clear()
        receiver._receiver.model.update(arrays(0.0))
        again = threading.Thread(target=keep_error, args=(receiver.connect, found))
        again.start()
        time.sleep(0.3)
        scheme.send(arrays(4.0))
        again.join(6)
        assert len(found) == 1 and value(receiver.model) == 4.0, found
    finally:
        receiver.shutdown()
        scheme.shutdown()


@pytest.mark.parametrize("share", [False, True])
def test_another_model_takes_the_place_of_a_receivers(share):
    net, before, after = (torch.nn.Linear(3, 2) for _ in range(3))
    with local_receivers(scheme := scheme_for(1, net), [before], "policy", zero_copy=share) as (receiver,):
        receiver.model, first = after, net.weight.detach().clone()
        for _ in range(4):  # through all memory that the sender uses
            net.weight.data += 1
            scheme.send()
            assert torch.equal(after.weight, net.weight) and torch.equal(before.weight, first)


def test_shutdown_while_another_thread_writes(monkeypatch):
    """In the middle of a large send."""
    model = {"w": np.zeros(20_000_000)}
    scheme, found = scheme_for(1, model, timeout=None), []
    with local_receivers(scheme, [{"w": np.zeros(20_000_000)}], "policy"):

        def work():
            while True:
                scheme.send()

        sending = threading.Thread(target=keep_error, args=(work, found), daemon=True)
        sending.start()
        time.sleep(0.2)
        scheme.shutdown()
        sending.join(5)
        assert not sending.is_alive(), "it hangs"
        assert found and isinstance(found[0], (UsageError, WorkerLeftError)) and "shut" in str(found[0]), repr(found)


def test_shutdown_while_another_thread_receives(monkeypatch):
    """The update that it has begun to apply is applied, whole; nothing that it reads is closed before."""
    applying, write = threading.Event(), receiver_module.Receiver._write

    def slow(*args):
        applying.set()
        time.sleep(0.5)
        write(*args)

    scheme, mine, found = scheme_for(1, sync=False), arrays(0.0), []
    with local_receivers(scheme, [mine], "policy", background=False) as (receiver,):
        monkeypatch.setattr(receiver_module.Receiver, "_write", slow)
        scheme.send(arrays(2.0))
        receiving = threading.Thread(target=keep_error, args=(receiver.receive, found))
        receiving.start()
        assert applying.wait(TIMEOUT)
        receiver.shutdown()
        assert value(mine) == 2.0
        receiving.join(TIMEOUT)
        assert not found, repr(found)


def held():
    threads = [t for t in threading.enumerate() if "weight sync" in t.name]
    return len(threads), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("side", ["sender", "both"])
def test_a_scheme_that_is_dropped_gives_everything_back(side):
    gc.collect()
    before = held()

    def use():
        scheme = scheme_for(1, sync=False)
        if side == "both":
            receiver = pickle.loads(pickle.dumps(scheme))
            receiver.init_on_receiver(model_id="policy", worker_idx=0, model=arrays(0.0))
            scheme.connect()
            receiver.connect()
            scheme.wait_async()
        else:
            scheme.connect()

    use()
    gc.collect()
    end = time.perf_counter() + 3
    while held() > before and time.perf_counter() < end:
        time.sleep(0.05)
    assert held() <= before, (before, held())


def test_a_scheme_never_connected_leaks_no_descriptor():
    gc.collect()
    before = held()
    scheme_for(1)
    gc.collect()
    assert held() <= before, (before, held())


def test_shutdown_gives_everything_back():
    gc.collect()
    before = held()
    with local_receivers(scheme_for(2), [arrays(0.0), arrays(0.0)], "policy"):
        pass
    gc.collect()
    assert held() <= before, (before, held())


@pytest.mark.slow
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 2)], indirect=["mpi"])
def test_many_schemes_in_one_job(run_ranks, n):
    assert "well" in run_ranks("weight_corners.py", n, 2200, timeout=50).out


# ---- 8. as torchrl documents


def collector_with(scheme):
    from sync_torchrl import make_env, make_policy
    from torchrl.collectors import MultiSyncCollector

    torch.set_num_threads(1)
    return MultiSyncCollector(
        [make_env] * 2, make_policy(), frames_per_batch=40, total_frames=-1, weight_sync_schemes={"policy": scheme}
    )


@pytest.mark.torchrl
@pytest.mark.timeout(120)
def test_a_collector_that_shuts_down_shuts_its_scheme_down():
    scheme = torchrl_scheme()
    collector = collector_with(scheme)
    next(iter(collector))
    collector.shutdown()
    try:
        assert scheme._closed
    finally:
        scheme.shutdown()


@pytest.mark.torchrl
def test_a_worker_with_an_on_update_of_its_own_updates_its_collector_too():
    import torchrl.collectors  # noqa: F401  # a scheme looks whether it is loaded

    class Collector:
        def __init__(self):
            self.policy, self.worker_idx, self.calls = torch.nn.Linear(2, 1), 0, []

        def update_policy_weights_(self, *, model_id, policy_or_weights):
            self.calls.append((model_id, bool((policy_or_weights["weight"] == self.policy.weight).all())))

    scheme, collector = scheme_for(1, torch.nn.Linear(2, 1)), Collector()
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(
        model_id="policy", context=collector, on_update=lambda version: collector.calls.append(version)
    )
    thread = threading.Thread(target=receiver.connect)
    thread.start()
    scheme.connect()
    scheme.send()
    thread.join()
    receiver.shutdown()
    scheme.shutdown()
    assert collector.calls == [("policy", True), 1, ("policy", True), 2]


def test_there_is_a_default_timeout_that_the_error_names():
    assert MultiProcessWeightSyncScheme().timeout is not None


def test_what_torchrl_asks_a_scheme():
    scheme, mine, context = scheme_for(1, torch.nn.Linear(2, 1)), torch.nn.Linear(2, 1), type("Context", (), {})()
    assert scheme.initialized_on_sender and not scheme.synchronized_on_sender and scheme.model_id == "policy"
    assert scheme.context is None and scheme.worker_idx is None
    with local_receivers(scheme, [mine], "policy") as (receiver,):
        assert scheme.synchronized_on_sender and not scheme.synchronized_on_receiver
        assert receiver.initialized_on_receiver and receiver.synchronized_on_receiver and receiver.worker_idx == 0
        receiver.context = context
        assert receiver.context is context and receiver.receive() is None and receiver.model is mine


def test_an_unknown_worker_is_a_value_error():
    with local_receivers(scheme := scheme_for(1), [arrays(0.0)], "policy"), pytest.raises(ValueError):
        scheme.send(worker_ids=5)


def fail_to_make():
    raise ValueError("no such environment")


@pytest.mark.torchrl
@pytest.mark.timeout(120)
def test_an_environment_that_fails_is_named_by_the_collector():
    from sync_torchrl import make_env, make_policy
    from torchrl.collectors import MultiSyncCollector

    torch.set_num_threads(1)
    with pytest.raises(Exception, match="no such environment"):
        MultiSyncCollector(
            [make_env, fail_to_make],
            make_policy(),
            frames_per_batch=40,
            total_frames=-1,
            weight_sync_schemes={"policy": torchrl_scheme()},
        )


@pytest.mark.parametrize("machines", [1, 2])
def test_a_sender_whose_program_ends_without_shutdown(run_ranks, machines):
    out = run_ranks("weight_unended.py", 3, env={"MPI_UTIL_MACHINES": str(machines)}, timeout=20).out
    assert sorted(out.splitlines()) == ["well 0", "well 1", "well 2"]


@pytest.mark.slow
def test_threads_that_collectors_start_inside_frozen_go_on():
    """Two threads play, each with several that read too, while updates arrive all the time."""
    from concurrent.futures import ThreadPoolExecutor

    scheme, mine = scheme_for(1), arrays(0.0)
    with local_receivers(scheme, [mine], "policy") as (receiver,):
        ends, errors, rollouts = time.perf_counter() + 4, [], [0, 0]

        def step(_):
            with receiver.frozen():
                time.sleep(1e-3)

        def collect(k):
            with ThreadPoolExecutor(8) as pool:
                while time.perf_counter() < ends:
                    with receiver.frozen():
                        list(pool.map(step, range(8)))
                    rollouts[k] += 1

        threads = [threading.Thread(target=keep_error, args=(lambda k=k: collect(k), errors)) for k in range(2)]
        for thread in threads:
            thread.start()
        while time.perf_counter() < ends:
            scheme.send_async()
            time.sleep(0.02)
        for thread in threads:
            thread.join(30)
        assert not errors and min(rollouts) > 2, (errors, rollouts)
        scheme.wait_async()


def test_a_model_whose_names_are_numbers():
    model = {0: np.ones(2), 1: np.zeros(3)}
    mine = {0: np.zeros(2), 1: np.ones(3)}
    with local_receivers(scheme := scheme_for(1, model), [mine], "policy"):
        scheme.send({0: np.full(2, 5.0), 1: np.zeros(3)})
        assert (mine[0] == 5.0).all()


def test_weights_by_worker_that_lack_one():
    models = [arrays(0.0), arrays(0.0)]
    with local_receivers(scheme := scheme_for(2), models, "policy"), pytest.raises(UsageError, match="worker 1"):
        scheme.send({0: arrays(1.0)}, worker_ids=[0, 1])


def test_weights_by_worker_of_which_one_does_not_fit():
    models, wrong = [arrays(0.0), arrays(0.0)], {"layer": {"w": np.ones(2)}}
    with local_receivers(scheme := scheme_for(2), models, "policy"):
        before = [value(model) for model in models]
        with pytest.raises(WeightsError):
            scheme.send({0: arrays(5.0), 1: wrong})
        assert [value(model) for model in models] == before and scheme.version == 1
