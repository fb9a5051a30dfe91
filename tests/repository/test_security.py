"""What docs/security.md promises: what another user, a file and a process that connects can and cannot do."""

import contextlib
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import secrets
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import RANKS, ROOT, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sync_workers import arrays, keep_error, local_receivers, wait_for

from mpi_util import UsageError, WeightsError, WorkerLeftError
from mpi_util.arrays.layout import Layout
from mpi_util.errors import SyncTimeoutError
from mpi_util.host import reap
from mpi_util.host.segments import Segment
from mpi_util.launch.supervise import Job
from mpi_util_spinup.files import read, replace_file
from mpi_util_spinup.logx import Logger, load_weights, restore_tf_graph
from mpi_util_spinup.play_policy import load_policy_and_env
from mpi_util_weight_sync import MultiProcessWeightSyncScheme
from mpi_util_weight_sync import publisher as publishing
from mpi_util_weight_sync.connection import (
    FRAME_BYTES,
    Address,
    Deadline,
    Kind,
    ProtocolError,
    frame,
    parse,
)
from mpi_util_weight_sync.layout import Weights, packed, unpacked
from mpi_util_weight_sync.receiver import Subscriber

NOBODY = 65534
NAME = "the model 'policy'"
FEW, MANY = 1_000, 3_000
slow_too = pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Bomb:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def fuzz(cases: int, **strategies):
    """The test, with so many cases."""

    def decorate(test):
        checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
        settings(max_examples=cases, deadline=None, database=None, suppress_health_check=checks)(
            given(**strategies)(test)
        )()

    return decorate


def heard(sock: socket.socket) -> bytes:
    """The next message; b"" if the other end has closed."""
    sock.settimeout(10)
    try:
        return sock.recv(FRAME_BYTES)
    except ConnectionResetError:  # with something unread
        return b""


@contextlib.contextmanager
def as_nobody(act, *arguments):
    """This end of the pipe of a process of another user, which runs act(pipe, ...)."""

    def begin(pipe):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        act(pipe, *arguments)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=begin, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


@pytest.fixture
def scheme():
    """A sender that accepts workers 0 and 1."""
    made = MultiProcessWeightSyncScheme(timeout=30)
    made.init_on_sender(model_id="policy", model=arrays(1.0), num_workers=2)
    made._sender.publisher.open()
    yield made
    made.shutdown()


def receiver_of(scheme, worker=0, timeout=10):
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.timeout = timeout
    receiver.init_on_receiver(model_id="policy", worker_idx=worker, model=arrays(0.0))
    return receiver


def connected(address, *messages: bytes) -> socket.socket:
    """A socket of a process that knows where a sender listens."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(address.name)
    with contextlib.suppress(BrokenPipeError):  # it is turned away already
        for message in messages:
            stranger.send(message)
    return stranger


def works(scheme) -> bool:
    """True if both workers get the sender's weights, soon."""
    began, models = time.perf_counter(), [arrays(0.0), arrays(0.0)]
    with local_receivers(scheme, models, "policy"):
        scheme.send(arrays(7.0))
        return all((model["layer"]["w"] == 7).all() for model in models) and time.perf_counter() - began < 5


# ---- another user


def listen_as_the_sender(pipe, name):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    listener.listen()
    pipe.send("listening")
    stranger, _ = listener.accept()
    with contextlib.suppress(OSError):
        stranger.send(frame(Kind.STOP))
    pipe.send(heard(stranger))


@needs_root
def test_a_worker_tells_another_user_at_that_address_nothing(scheme):
    receiver = receiver_of(scheme)
    scheme.shutdown()
    with as_nobody(listen_as_the_sender, scheme._address.name) as pipe:
        assert pipe.recv() == "listening"
        with pytest.raises(WorkerLeftError, match=f"belongs to user {NOBODY}"):
            receiver.connect()
        assert pipe.recv() == b""


def connect_to_the_sender(pipe, address):
    strangers = [connected(address, frame(Kind.HELLO, bytes(32), 0, NAME)) for _ in range(300)]
    pipe.send([heard(stranger) for stranger in strangers[-3:]])
    pipe.recv()


@needs_root
def test_the_sender_tells_another_user_nothing(scheme):
    with as_nobody(connect_to_the_sender, scheme._address) as pipe:
        assert pipe.recv() == [b""] * 3
        wait_for(lambda: f"belongs to user {NOBODY}" in scheme._sender.publisher.turned_away)
        assert works(scheme)


def open_memory(pipe, ticket, path):
    for file in (f"/proc/{ticket.pid}/fd/{ticket.fd}", path):
        try:
            pipe.send(os.open(file, os.O_RDONLY))
        except PermissionError:
            pipe.send("refused")


@needs_root
def test_another_user_cannot_open_what_a_job_shares():
    segment, job = Segment(1000), Job(2)
    try:
        with as_nobody(open_memory, segment.ticket, f"{job.folder}/alive-0") as pipe:
            assert [pipe.recv(), pipe.recv()] == ["refused"] * 2
    finally:
        segment.close()
        job.monitor.close()


def test_permissions_of_shared_memory_and_of_the_jobs_folder():
    before = os.umask(0)
    segment, job = Segment(1000), Job(2)
    try:
        assert stat.S_IMODE(os.fstat(segment.ticket.fd).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(job.folder).st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in Path(job.folder).iterdir()} == {0o600}
    finally:
        os.umask(before)
        segment.close()
        job.monitor.close()


@needs_root
def test_another_users_process_is_none_of_the_job(tmp_path):
    folder = str(tmp_path)
    mine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={reap.JOB_VARIABLE: folder})

    def pretend(pipe):
        os.set_inheritable(pipe.fileno(), True)
        sleeper = "/bin/sleep"
        pipe.send(os.getpid())
        os.execve(sleeper, [sleeper, "60"], {reap.JOB_VARIABLE: folder})

    with as_nobody(pretend) as pipe:
        pid = pipe.recv()
        wait_for(lambda: folder.encode() in Path(f"/proc/{pid}/environ").read_bytes())
        wait_for(lambda: reap.belongs(mine.pid, folder))
        assert reap.job_processes(folder) == [mine.pid]
    mine.communicate()


@needs_root
def test_what_is_handed_to_an_experiment_must_be_ones_own(tmp_path):
    check_that_it_is_not_unpickled(tmp_path, lambda path: os.chown(path, NOBODY, NOBODY), f"user {NOBODY}")


def test_an_experiments_file_must_be_closed_to_others(tmp_path):
    check_that_it_is_not_unpickled(tmp_path, lambda path: path.chmod(0o620), "mode 620")


def check_that_it_is_not_unpickled(tmp_path, spoil, text):
    path, loaded = tmp_path / "job", tmp_path / "loaded"
    path.write_bytes(pickle.dumps((1, Bomb(loaded))))
    path.chmod(0o600)
    assert read(path, own=True)
    spoil(path)
    program = f"from mpi_util_spinup.experiment import run_packed; run_packed({str(path)!r})"
    finished = run([sys.executable, "-c", program], 60)
    assert finished.status == 1 and text in finished.err and not loaded.exists()


def test_names_in_shared_folders_cannot_be_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "experiments").symlink_to(tmp_path / "theirs")  # as another user makes it in /tmp
    folder = Path(Logger().output_dir)
    assert not list((tmp_path / "theirs").iterdir()) and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent == tmp_path / "tmp"


def test_a_link_in_place_of_a_draft_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".progress.txt.new").symlink_to(victim)
    replace_file(tmp_path / "progress.txt", b"new")
    assert victim.read_text() == "mine" and (tmp_path / "progress.txt").read_bytes() == b"new"


def test_nothing_is_imported_from_the_current_directory(tmp_path):
    for name in ("json", "importlib", "mpi4py", "subprocess"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()")
    finished = run([sys.executable, RANKS / "spinup_grid.py", "call", 2, 1], 60, cwd=tmp_path)
    assert finished.status == 0 and not (tmp_path / "imported").exists(), finished.err


# ---- a process of the same user, without the key


def test_who_has_not_the_key_gets_no_further_than_the_handshake(scheme):
    key = scheme._address.key
    for wrong in (bytes(32), key[:-1] + bytes([key[-1] ^ 1])):
        assert heard(connected(scheme._address, frame(Kind.HELLO, wrong, 0, NAME))) == b""
        wait_for(lambda: "does not have the key" in scheme._sender.publisher.turned_away)
    with pytest.raises(SyncTimeoutError, match=r"worker 0 has not connected.*turned away: process \d+: it does not"):
        scheme._connected = True
        scheme.send(timeout=0.1)


@pytest.mark.parametrize("how", ["another process", "junk"])
def test_a_worker_believes_no_stranger_at_that_address(scheme, how):
    receiver = receiver_of(scheme)
    scheme.shutdown()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(scheme._address.name)
    listener.listen()
    if how == "another process":
        receiver._address = scheme._address._replace(pid=1)
    found = []
    thread = threading.Thread(target=keep_error, args=(receiver.connect, found))
    thread.start()
    stranger, _ = listener.accept()
    first = heard(stranger)
    if how == "another process":
        assert first == b""  # not the key
    else:
        stranger.send(b"junk")
        stranger.shutdown(socket.SHUT_RDWR)  # which wakes it
    thread.join(10)
    text = {"another process": "has taken its address", "junk": "sent 4 bytes that are no message"}[how]
    assert isinstance(found[0], WorkerLeftError) and text in str(found[0])


def test_silent_and_loud_strangers_keep_no_worker_out(scheme):
    first = [(), (b"",), (b"junk",), (frame(Kind.HELLO, bytes(32), 0, NAME),), (bytes(FRAME_BYTES + 10),)]
    with contextlib.ExitStack() as strangers:
        for messages in first * 20:
            strangers.enter_context(connected(scheme._address, *messages))
        assert works(scheme)
    wait_for(lambda: not scheme._sender.publisher._guests)


def test_a_silent_stranger_is_turned_away_in_time(scheme, monkeypatch):
    monkeypatch.setattr(publishing, "_HELLO_S", 0.1)
    with connected(scheme._address) as stranger:
        assert heard(stranger) == b""
    assert "sent nothing within 0.1 s" in scheme._sender.publisher.turned_away


def test_a_descriptor_that_comes_with_a_message_is_not_kept(scheme):
    stranger, (reading, writing) = connected(scheme._address), os.pipe()
    socket.send_fds(stranger, [frame(Kind.HELLO, scheme._address.key, 0, NAME)], [writing])
    wait_for(lambda: scheme._sender.workers[0].connection)
    os.close(writing)
    assert os.read(reading, 1) == b""  # nobody else has its other end
    os.close(reading)
    stranger.close()


# ---- a worker or a sender that has the key, and sends what it should not


def admitted(scheme, worker=0):
    subscriber = Subscriber(scheme._address, worker, NAME)
    wait_for(lambda: scheme._sender.workers[worker].connection is not None)
    return subscriber


HOSTILE = {
    "an answer to version 9": frame(Kind.ACK, 9),
    "an answer to version -1": frame(Kind.ERROR, -1, 0, "text"),
    "UPDATE out of turn": frame(Kind.UPDATE, 1, 2, 3, 4, []),
    "ACK of a wrong length": frame(Kind.ACK, 1) + b"1",
    "1 bytes that are no message": b"1",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_worker_that_sends_nonsense_is_dropped_with_the_reason(scheme, text):
    subscriber = admitted(scheme)
    scheme._connected, scheme.sync = True, False
    scheme.send(worker_ids=0)
    subscriber._connection._sock.send(HOSTILE[text])
    with pytest.raises(WorkerLeftError, match=rf"worker 0: its process \(\d+\) sent {text}"):
        scheme.wait_async(10)


def test_a_worker_that_floods_its_sender_is_harmless(scheme):
    subscriber, ended = admitted(scheme), threading.Event()
    scheme._connected, scheme.sync = True, False
    scheme.send(worker_ids=0)

    def flood():
        while not ended.is_set():
            subscriber.answer(Kind.ERROR, 1, 0, "x" * 60_000)

    thread = threading.Thread(target=flood)
    thread.start()
    wait_for(lambda: scheme.versions and scheme._sender.publisher.failures)
    for _ in range(50):
        assert scheme.versions == {0: 0, 1: 0}
    assert len(scheme._sender.publisher.failures) == 1
    ended.set()
    scheme._sender.publisher.close()
    thread.join(10)


# ---- frames, handshakes, descriptions, files: any bytes

SEEDS = st.integers(0, 2**64).map(random.Random)  # hypothesis draws one number a case, which takes a tenth of the time


def some_message(rng: random.Random) -> tuple:
    """A kind and items that fit it."""
    kind = rng.choice([*Kind])
    makers = {"q": lambda: rng.randrange(-(2**63), 2**63), "32s": lambda: rng.randbytes(32)}
    items = [makers[item]() for item in re.findall(r"32s|q", kind.items.format.replace("4q", "qqqq"))]
    rests = {"s": ["text" * rng.randrange(20)], "q": [tuple(makers["q"]() for _ in range(rng.randrange(9)))], "": []}
    return kind, *items, *rests[kind.rest]


def spoilt(rng: random.Random) -> bytes:
    """A message that was cut, lengthened, or changed in some bits; or only its header; or anything."""
    data = bytearray(frame(*some_message(rng)))
    how = rng.choice(["flip", "cut", "more", "length", "body", "any", "large"])
    if how == "flip":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "more":
        data += rng.randbytes(rng.randint(1, 40))
    elif how == "length":
        data[2:6] = rng.choice([0, 1, 2**16, 2**31, 2**32 - 1]).to_bytes(4, sys.byteorder)
    elif how == "body":
        data[6:] = rng.randbytes(rng.randrange(len(data)))
    elif how == "large":
        data += bytes(rng.randrange(FRAME_BYTES - 100, 3 * FRAME_BYTES))
    else:
        data = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(data)


@slow_too
def test_any_frame_is_a_message_or_one_clear_error(cases):
    largest = 0

    @fuzz(cases, rng=SEEDS)
    def check(rng):
        nonlocal largest
        good, bad = some_message(rng), spoilt(rng)
        assert parse(frame(*good), [good[0]]) == good
        tracemalloc.start()
        try:
            parse(bad, [*Kind])
        except ProtocolError as error:
            assert "\n" not in str(error) and len(str(error)) < 120
        largest = max(largest, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    assert largest < 8 * FRAME_BYTES


@slow_too
def test_any_handshake_ends_at_once(scheme, cases):
    address, publisher, worker = scheme._address, scheme._sender.publisher, scheme._sender.workers[0]

    @fuzz(cases // 2, rng=SEEDS)
    def to_the_sender(rng):
        hello = frame(Kind.HELLO, bytes(32), 0, NAME)
        messages = rng.sample([spoilt(rng), spoilt(rng), hello], rng.randint(1, 3))
        with connected(address) as stranger, contextlib.suppress(BrokenPipeError, ConnectionResetError, OSError):
            for message in messages:
                stranger.send(message)
            stranger.shutdown(socket.SHUT_WR)
            assert heard(stranger) == b""
        assert worker.connection is None

    wait_for(lambda: not publisher._guests)
    listener, here = (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET),
        Address(bytes(32), os.getpid(), "\0mpi_util-test-" + secrets.token_hex(8)),
    )
    listener.bind(here.name)
    listener.listen()

    @fuzz(cases // 2, rng=SEEDS)
    def to_a_worker(rng):
        subscriber = Subscriber(here, 0, NAME)
        stranger, _ = listener.accept()
        with stranger:
            assert parse(heard(stranger), [Kind.HELLO])
            with contextlib.suppress(OSError):
                stranger.send(spoilt(rng))
            with contextlib.suppress(WorkerLeftError, UsageError):
                found = subscriber.next(Deadline(0))
                if found is not None:
                    with subscriber.reader.reading(found.ticket):
                        pass
        subscriber.close()
        subscriber.reader.keep(())

    listener.close()
    assert works(scheme)


STRUCTURED = np.dtype([("a", "f4"), ("b", "i8", (2, 3)), ("c", [("x", "?"), ("y", "S5")])])


def test_a_structured_array_arrives():
    values = np.frombuffer(np.random.default_rng(0).bytes(STRUCTURED.itemsize * 3), STRUCTURED).copy()
    aligned = np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    aligned["b"] = 3.5
    mine = {"s": np.zeros_like(values), "t": np.zeros_like(aligned), "when": np.zeros(1, "datetime64[s]")}
    scheme = MultiProcessWeightSyncScheme(timeout=30)
    scheme.init_on_sender(model={"s": values, "t": aligned, "when": np.ones(1, "datetime64[s]")}, num_workers=1)
    with local_receivers(scheme, [mine]):
        assert mine["s"].tobytes() == values.tobytes() and (mine["t"] == aligned).all() and mine["when"].view("i8") == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["O", "f4", "<f4", "b", "i4,O", "name"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["base", "shape", "names"]), inner),
    max_leaves=8,
)


@slow_too
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy, for old names of dtypes
def test_any_description_of_weights_fits_or_is_one_clear_error(cases):
    layout = Weights.of({"a": np.zeros((3, 2)), "s": np.zeros(2, STRUCTURED), "z": np.zeros(0)}).layout()
    text = packed(layout)
    again = unpacked(text, layout.nbytes)
    assert again.entries == layout.entries and again.nbytes == layout.nbytes

    @fuzz(cases, place=st.integers(0, 10**6), value=JSON, flips=st.lists(st.integers(0, 8 * len(text) - 1), max_size=3))
    def check(place, value, flips):
        content = json.loads(text)
        nodes = [(content, i) for i in range(2)]
        for parent, key in nodes:
            inner = parent[key]
            keys = range(len(inner)) if isinstance(inner, list) else inner if isinstance(inner, dict) else ()
            nodes += [(inner, each) for each in keys]
        parent, key = nodes[place % len(nodes)]
        parent[key] = value
        flipped = bytearray(text)
        for bit in flips:
            flipped[bit // 8] ^= 1 << bit % 8
        for data in (json.dumps(content).encode(), bytes(flipped)):
            try:
                found = unpacked(data, layout.nbytes)
            except WeightsError as error:
                assert "is damaged" in str(error)
            else:
                assert isinstance(found, Layout) and found.nbytes <= layout.nbytes
                assert sum(view.nbytes for view in found.views(bytes(layout.nbytes))) <= layout.nbytes
                assert not any(view.dtype.hasobject for view in found.views(bytes(layout.nbytes)))


def test_weights_of_a_damaged_file_are_one_clear_error(tmp_path):
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    np.savez(good, a=np.arange(9.0), b=np.ones((2, 2), "f4"))
    data = good.read_bytes()

    @fuzz(FEW // 4, flips=st.lists(st.integers(0, 8 * len(data) - 1), max_size=4), end=st.integers(0, len(data)))
    def check(flips, end):
        spoilt = bytearray(data if flips else data[:end])
        for bit in flips:
            spoilt[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(spoilt)
        with contextlib.suppress(UsageError):
            load_weights(bad)

    large = io.BytesIO()
    np.lib.format.write_array_header_1_0(large, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("a.npy", large.getvalue())
    with pytest.raises(UsageError, match="cannot load weights"):
        load_weights(bad)


def test_no_file_is_unpickled_unasked(tmp_path):
    loaded = tmp_path / "loaded"
    np.savez(tmp_path / "weights.npz", a=np.array([Bomb(loaded)], object))
    with pytest.raises(UsageError, match="cannot load weights"):
        load_weights(tmp_path / "weights.npz")
    (tmp_path / "model_info.pkl").write_bytes(pickle.dumps(Bomb(loaded)))
    with pytest.raises(UsageError, match=r"pickle, which can run any code.*trust=True"):
        restore_tf_graph(None, tmp_path)
    (tmp_path / "pyt_save").mkdir()
    for name in ("vars.pkl", "pyt_save/model.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(loaded)))
    finished = run([sys.executable, ROOT / "examples" / "adopt_test_policy.py", tmp_path], 60)
    assert finished.status == 2 and "add --trust" in finished.err and not loaded.exists()
    for name in ("vars.pkl", "pyt_save/model.pt"):
        with pytest.raises(UsageError, match=f"{name} is a pickle.*trust=True"):
            load_policy_and_env(tmp_path)
        (tmp_path / name).unlink()
    assert not loaded.exists()


# ---- what is kept from logs, what is checked in the code


def test_the_key_is_in_no_message(scheme):
    assert scheme._address.key in pickle.dumps(scheme)
    assert repr(scheme._address.key) not in repr(scheme._address) + repr(scheme.__getstate__())


PACKAGES = ("mpi_util", "mpi_util_spinup", "mpi_util_weight_sync", "mpi_util_sb3")
UNPICKLES = {
    "mpi_util/collectives/pickles.py": 1,  # messages of the job
    "mpi_util/collectives/messages.py": 1,  # the same
    "mpi_util/ranks/runner.py": 2,  # runs the program of a rank
    "mpi_util_spinup/experiment.py": 2,  # what the launcher hands to its own process
    "mpi_util_spinup/savers.py": 1,  # trust=True
    "mpi_util_spinup/play_policy.py": 2,  # trust=True
    "examples/adopt_test_policy.py": 2,  # --trust
}


def test_nothing_else_is_unpickled():
    pattern = r"pickle\.loads?\(|torch\.load\(|joblib\.load|Unpickler|allow_pickle=True|marshal|shelve"
    pattern += r"|(?<!\.)\b(eval|exec)\("
    found = {}
    for folder in (*PACKAGES, "trainer", "policies", "examples", "docs", "."):
        for path in sorted((ROOT / folder).glob("*.py" if folder == "." else "**/*.py")):
            if count := sum(bool(re.search(pattern, line)) for line in path.read_text().splitlines()):
                found[path.relative_to(ROOT).as_posix()] = count
    assert found == UNPICKLES


def test_ruffs_security_rules_pass_and_are_on():
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache"]
    finished = run([*ruff, "."], 60)
    assert finished.status == 0, finished.out
    for path in ("mpi_util/x.py", "trainer/x.py", "policies/x.py", "train.py", "examples/x.py", "docs/x.py"):
        code = "import pickle\n\npickle.loads(b'')\n"
        command = [*ruff, "--stdin-filename", path, "-"]
        done = subprocess.run(command, input=code, cwd=ROOT, capture_output=True, text=True)
        assert "S301" in done.stdout, path


def test_every_test_that_the_document_names_exists():
    code = Path(__file__).read_text()
    named = re.findall(r"`(?:test_|\.\.\.)\w+(?:\.\.\.)?`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 15
    for name in named:
        assert re.search(name.strip("`").replace("...", r"\w+") + r"\(", code), name
