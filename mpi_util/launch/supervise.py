"""Watch over a job from the process that the user started: pass on output and signals, leave nothing behind.

The ranks of this machine are watched here (watch.py), those of other hosts by agents there (remote.py, agent.py): what
they report is handled as what happens here, and the records of their ranks are copied into the job's folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..cluster import remote, rsh
from ..cluster.hosts import Hosts
from ..errors import HostError, LaunchError
from ..host import reap
from ..ranks.failure import SAME_SIGNAL_S, print_line
from .banners import STDERR, STDOUT, Parts, Stream
from .monitor import FOLDER_VARIABLES, Watch
from .verdict import Evidence, Verdict, describe_signal, failed_record, judge

_LAUNCHER_PATIENCE_S = 1.5  # a launcher that has not ended the job so long after it broke is not going to
_DRAIN_S, _LOOK_S = 1.0, 0.05
_NOTICE_S = 5.0  # after a signal, or the last rank's end, until the user learns why the job has not ended
_END_S = 9.0  # for the agents to end what is on their hosts; longer than it takes to know that one is lost
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """One launcher with its ranks, from start to end.

    Args:
        environment: of launcher and ranks. hosts: other ones too. script: the program's file, which all hosts need.
        tag: lines of the ranks begin with `[rank@host]`. log_dir: the folder for a file with the lines of each rank.

    Attributes:
        places: the ranks of each host, by the name that the launcher gets; {}: all are here.
        rsh: the program that the launcher is to use in place of ssh, if others are used.

    Raises HostError.
    """

    def __init__(
        self, n_ranks: int, environment: dict[str, str] | None = None, hosts: Hosts | None = None, script: str = "",
        tag: bool = False, log_dir: str = "",
    ):  # fmt: skip
        # made when all hosts have answered: then its guard is there
        self.folder = os.path.join(tempfile.gettempdir(), f"mpi_util-{secrets.token_hex(8)}")
        self.rsh = f"{self.folder}/rsh.sh"
        self._here = ""
        self._environment = (environment or {}) | dict.fromkeys(FOLDER_VARIABLES, self.folder)
        self._evidence = Evidence(n_ranks, Path(self.folder))
        self._remotes: dict[str, remote.Remote] = {}
        self.places: dict[str, list[int]] = {}
        try:
            ranks = self._place(hosts or Hosts({}), script)
            os.mkdir(self.folder, 0o700)
            self._watch = Watch(Path(self.folder), ranks, self._died)
            if self._remotes:
                self._write_rsh()
        except BaseException:
            self._close_remotes()
            reap.end_job(self.folder)
            raise
        self._decided: Verdict | None = None  # when a signal ends the job at once
        self._streams: list[Stream] = []
        self._tag, self._log_dir = tag, log_dir
        self._asking: dict[int, socket.socket] = {}  # for a process on another host
        self.saved = ""  # at the end, what the ranks wrote in saved-0 (restarts.saved)
        self._descriptors: list[int] = []
        self._signals = -1  # becomes readable when one has come
        self._signalled_at = -math.inf  # the last SIGINT or SIGTERM
        self._notice_at = math.inf  # when to look whether rank 0 does what a signal asks for
        self._noticed = False
        self._kept_at = math.inf  # when to say what keeps the launcher, though all ranks have ended
        self._broken_at = math.inf  # when something went wrong, at which the launcher is to end the job

    def _place(self, hosts: Hosts, script: str) -> list[int]:
        """Connects to the hosts. Returns the ranks of this one."""
        n = self._evidence.n_ranks
        places = hosts.places(n) if hosts.slots else {"": [*range(n)]}
        if not hosts.slots:
            return places[""]
        remotes, wrong = remote.connect(places, hosts.shell, self.folder, self._environment, script)
        self._remotes = {each.name: each for each in remotes}
        if bad := {name: what for name, what in wrong.items() if what}:
            raise HostError(bad)
        here = next(iter(wrong), "")
        if self._remotes:
            self._here = socket.gethostname() if here in ("localhost", "127.0.0.1") else here
            self.places = {self._here if name == here else name: ranks for name, ranks in places.items()}
            self._evidence.hosts = {rank: name for name, ranks in self.places.items() for rank in ranks}
        return places.get(here, [])

    def _write_rsh(self) -> None:
        """Makes the program that the launcher is to use in place of ssh."""
        path, command = Path(self.rsh), shlex.join([sys.executable, "-I", "-S", rsh.__file__, self.folder])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o700)
        if not os.access(path, os.X_OK):
            raise LaunchError(f"no program can be run in {path.parent.parent}; set TMPDIR to a folder where one can")

    def run(self, command: list[str], stdin: int | IO[Any] | None = None) -> Verdict:
        """Starts the launcher; returns when nothing of the job is left: no process, no folder, no shared memory.

        Args: stdin: as for subprocess.Popen.
        """
        try:
            with self._signals_caught(), self._launches_for_others():
                # in a session of its own: a terminal's Ctrl-C does not reach it, and the parent forwards it in order
                self._launcher = subprocess.Popen(  # noqa: S603  # the user's own command line once more
                    command, env=self._environment, stdin=stdin,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
                return self._supervise()
        finally:
            self.close()

    def close(self) -> None:
        """Ends what is left of the job, and removes its folder."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._close_remotes()
        self._watch.close()

    def _close_remotes(self) -> None:
        for each in self._remotes.values():
            each.close()

    @contextlib.contextmanager
    def _launches_for_others(self) -> Iterator[None]:
        """Within it, agents are heard, and start what the launcher asks for by rsh.py."""
        if not self._remotes:
            yield
            return
        watch = self._watch
        for each in self._remotes.values():
            each.say(go=True)
            watch.selector.register(each.output, selectors.EVENT_READ, lambda each=each: self._hear(each))
        with socket.socket(socket.AF_UNIX) as listener:
            folder = os.open(self.folder, os.O_PATH)
            listener.bind(f"/proc/self/fd/{folder}/rsh")  # the path of a socket has to be short
            os.close(folder)
            listener.listen(len(self._remotes))
            watch.selector.register(listener, selectors.EVENT_READ, lambda: self._ask(listener.accept()[0]))
            try:
                yield
            finally:
                watch.selector.unregister(listener)
                for connection in self._asking.values():
                    connection.close()

    def _ask(self, connection: socket.socket) -> None:
        """The launcher wants a process on another host."""
        with connection.makefile() as file:  # it writes at once
            arguments = json.loads(file.readline())
        at = next((k for k, argument in enumerate(arguments) if argument in self.places), None)
        if at is None:
            connection.close()
            return
        number = len(self._asking)
        self._asking[number] = connection
        # Open MPI tells its process there of the program in place of ssh, which is only here
        command = " ".join(arguments[at + 1 :]).replace(self.rsh, "ssh")
        if arguments[at] != self._here:
            self._remotes[arguments[at]].say(start=number, command=command)
            return
        process = subprocess.Popen(  # noqa: S602  # the launcher does not know that it is here
            command, shell=True, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
        )
        self._watch.watch(process.pid, lambda _: self._answer({"process": number, "status": process.wait()}))

    def _hear(self, each: remote.Remote) -> None:
        """An agent has written, or has gone."""
        for message in each.receive():
            if "process" in message:
                self._answer(message)
            elif "record" in message:
                self._copy(each, message["record"], message["text"])
            elif "died" in message:
                self._died(message["died"], message["code"], message["certain"], each.here(message["time"]), each.name)
            elif "unready" in message:
                self._decided = self._decided or self._evidence.stopped_by(message["unready"])
            elif "wrong" in message:
                each.lose(message["wrong"])
        if each.done:
            with contextlib.suppress(KeyError):
                self._watch.selector.unregister(each.output)

    def _answer(self, message: dict[str, Any]) -> None:
        """Tells rsh.py of its process."""
        with contextlib.suppress(OSError):
            self._asking[message["process"]].sendall(json.dumps(message).encode() + b"\n")

    def _copy(self, each: remote.Remote, name: str, text: str) -> None:
        """Writes a record of a rank on another host into the job's folder."""
        if name.startswith("failed"):
            record = json.loads(text)
            text = json.dumps(record | {"time": each.here(record["time"])})
        path = self._evidence.folder / os.path.basename(name)
        draft = path.with_name(f".{path.name}")
        draft.write_text(text)
        os.replace(draft, path)

    def _look_at_hosts(self) -> None:
        for name, each in self._remotes.items():
            if not each.done:
                each.look()
            if each.lost and name not in self._evidence.lost:
                self._evidence.lost[name] = each.lost
                self._broken_at = -math.inf

    def _supervise(self) -> Verdict:
        evidence, launcher = self._evidence, self._launcher
        pipes = (launcher.stdout, STDOUT), (launcher.stderr, STDERR)
        parts = self._tag or self._log_dir
        for pipe, target in pipes:
            split = Parts(evidence.hosts, self._tag, self._log_dir) if parts else None
            self._streams += [Stream(pipe, target, split)] if pipe else []
        self._watch.watch(launcher.pid, lambda _: None)
        while launcher.poll() is None and not self._decided and self._is_patient():
            self._step()
        self._step(wait=False)
        code = launcher.poll()
        evidence.launcher_code, evidence.given_up = code or 0, code is None
        self._watch.kill()
        launcher.wait()
        self._end_hosts()
        self._drain()
        with contextlib.suppress(OSError):
            self.saved = (evidence.folder / "saved-0").read_text()
        evidence.banners = "".join(stream.filter.banners for stream in self._streams)
        return self._decided or judge(evidence)

    def _end_hosts(self) -> None:
        """Has the agents end what is on their hosts, and hears the rest."""
        for each in self._remotes.values():
            each.say(end=True)
        deadline = time.monotonic() + _END_S
        while not all(each.done for each in self._remotes.values()) and time.monotonic() < deadline:
            self._watch.step()
            self._look_at_hosts()
        self._look_at_hosts()

    def _is_patient(self) -> bool:
        """False when the launcher has had time enough to end a broken job."""
        if record := failed_record(self._evidence.folder):
            if record.in_order:
                return True
            self._mark_broken()
        if any(stream.stalls for stream in self._streams):  # the launcher cannot end before its output is read
            self._broken_at = max(self._broken_at, time.monotonic())
        return time.monotonic() - self._broken_at <= _LAUNCHER_PATIENCE_S

    def _step(self, wait: bool = True) -> None:
        """Waits for an event and handles it."""
        self._watch.step(wait)
        self._look_at_hosts()
        if time.monotonic() > self._notice_at:
            self._look_at_rank_0()
        if time.monotonic() > self._kept_at:
            self._look_at_others()

    def _record(self, rank: int) -> dict[str, Any]:
        return reap.read_record(self._evidence.folder / f"rank-{rank}")

    def _died(self, rank: int, code: int | None, certain: bool, at: float | None = None, host: str = "") -> None:
        """Records that a rank (-1: a helper process of the launcher) has ended, and how, if that can be known."""
        evidence, at = self._evidence, time.time() if at is None else at
        if rank < 0:
            if at < evidence.helper_at:
                evidence.helper_code, evidence.helper_host, evidence.helper_at = code or 0, host, at
            return self._mark_broken()
        evidence.died(rank, code, at)
        if not certain:
            return
        if len(evidence.deaths) == evidence.n_ranks:
            self._kept_at = time.monotonic() + _NOTICE_S
        if evidence.ended_in_order(rank):
            return
        self._mark_broken()
        if "shm" not in self._record(rank):
            self._broken_at = -math.inf  # above mpi_fork: the launcher waits for its MPI_Init, for ever

    def _mark_broken(self) -> None:
        self._broken_at = min(self._broken_at, time.monotonic())

    def _drain(self) -> None:
        """Waits for what is still in the pipes, as long as a reader of our output takes, but for a signal."""
        deadline, hurried = time.monotonic() + _DRAIN_S, self._decided is not None
        for stream in self._streams:
            stream.deadline = deadline
        while True:
            if late := self._new_signals():  # too late for rank 0
                self._evidence.forwarded, hurried = self._evidence.forwarded or max(late), True
            alive = [stream for stream in self._streams if stream.is_alive()]
            if not alive or (hurried and time.monotonic() > deadline):
                return
            alive[0].join(_LOOK_S)

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Within it, signals wake the selector. Only the main thread may catch them; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors += [self._signals, writer]
        self._watch.selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        previous_fd = signal.set_wakeup_fd(writer)
        # One that is ignored stays ignored: nohup, and background jobs of a script.
        caught = [signum for signum in (*_SIGNALS, signal.SIGTSTP) if signal.getsignal(signum) is not signal.SIG_IGN]
        previous = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(previous_fd)

    def _new_signals(self) -> list[int]:
        new = b""
        with contextlib.suppress(OSError):  # none has come, or this is not the main thread
            new = os.read(self._signals, 64)
        if signal.SIGTSTP in new:
            self._pause()
        return [signum for signum in new if signum in _SIGNALS]

    def _pause(self) -> None:
        """Ctrl-Z: all processes of the job stop with this one, and continue with it (`fg`)."""
        if self._remotes:  # whose agents would take this host for lost
            return print_line("mpi_util: a job on several hosts cannot pause; Ctrl-C ends it")
        stopped = reap.job_processes(self.folder, stop=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for pid in stopped:
            reap.send(pid, signal.SIGCONT)

    def _on_signals(self) -> None:
        """The first signal goes to rank 0, which ends the program in order; a second one ends everything now.

        A terminal that closes sends SIGHUP, sometimes twice: it is neither a first nor a second one.
        """
        for signum in self._new_signals():
            now, evidence = time.monotonic(), self._evidence
            if (signum == signal.SIGHUP and evidence.forwarded) or now - self._signalled_at < SAME_SIGNAL_S:
                continue
            if self._signalled_at > -math.inf or not self._signal_rank_0(signum):
                self._decided = self._decided or evidence.stopped_by(signum)
                return
            self._signalled_at = -math.inf if signum == signal.SIGHUP else now
            self._notice_at = min(self._notice_at, now + _NOTICE_S)
            evidence.forwarded = evidence.forwarded or signum

    def _signal_rank_0(self, signum: int) -> bool:
        """Returns False if it cannot handle a signal yet, or has ended."""
        if (host := self._host_of_0) is None:
            return self._watch.signal(0, signum)
        host.say(signal=signum, rank=0)
        return 0 not in self._evidence.deaths  # or it answers that the rank is not ready

    @property
    def _host_of_0(self) -> remote.Remote | None:
        return self._remotes.get(self._evidence.hosts.get(0, ""))

    def _look_at_rank_0(self) -> None:
        """Some seconds after a signal. Rank 0 may work on for long, and then save; if it is stopped, it never will."""
        evidence, pid = self._evidence, self._record(0).get("pid", 0)
        host = self._host_of_0
        if host.stopped if host else self._watch.is_stopped(0):
            but = f", but rank 0 (process {pid}) is stopped and cannot end in order"
            self._decided = evidence.stopped_by(evidence.forwarded, but)
        elif not (self._noticed or 0 in evidence.deaths or any(stream.stalls for stream in self._streams)):
            self._noticed = True
            again = "a second signal ends" if self._signalled_at > -math.inf else "SIGTERM twice ends"
            print_line(
                f"mpi_util: rank 0 (process {pid}) has got {describe_signal(evidence.forwarded)} and works on; "
                f"{again} everything now"
            )

    def _look_at_others(self) -> None:
        """Some seconds after the last rank has ended. A launcher waits for all who have its pipes open."""
        if any(stream.stalls for stream in self._streams):
            return
        self._kept_at = math.inf
        named = ", ".join(f"{reap.name_of(pid)} (process {pid})" for pid in self._watch.others())
        what = f"what they have started: {named}" if named else "their launcher, or a process that has their output"
        print_line(f"mpi_util: all ranks have ended; waiting for {what}; Ctrl-C ends it")
