"""The receiver's side of a scheme: takes what the sender announces, whole or not at all, while nobody looks."""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import MpiUtilError, SyncTimeoutError, UsageError, WeightsError, WorkerLeftError
from .bits import checksum
from .gate import Closed, Gate
from .layout import Layout, Plan, Plans, Weights, pack, unpack
from .port import Note, Port
from .sharing import Sharing

_VERIFY_BYTES = 1 << 20  # blocks up to this size are checked each time: it takes some microseconds
_JOIN_S = 5.0


class Receiver:
    """One worker's weights.

    Args:
        worker: its index.
        who: names the model in messages.
        model: what to write into; None: a dict of arrays is made (attribute `model`).
        coalesce: of several versions that wait apply only the newest.
        verify: recompute each checksum; None: of small blocks.
        share: the model's tensors point into the sender's block instead of being written.
        on_update: called with the version after each update.

    Attributes:
        version: of the weights that the model has; 0 before the first.
        checksum: as the sender computed it.
        skipped: number of messages that were stale or repeated.
        failure: why the thread that listened has ended, if it was not told to.
    """

    def __init__(
        self,
        worker: int,
        who: str,
        model: Any,
        coalesce: bool,
        verify: bool | None,
        share: bool,
        on_update: Callable[[int], None] | None,
    ):
        self.worker, self.who, self.model = worker, who, model
        self.gate = Gate()
        self.version = self.checksum = self.skipped = 0
        self.failure: Exception | None = None
        self._on_update = on_update
        self._coalesce, self._verify = coalesce, verify
        self._port: Port  # from `connect` on
        self._layout = Layout((), 0, ())  # the sender's, once it has said it
        self._plans = Plans()
        self._sharing = Sharing(model) if share else None
        self._held = contextlib.ExitStack()  # of the block that the model's tensors point into
        self._thread: threading.Thread | None = None

    def connect(self, port: Port, timeout: float | None) -> None:
        """Compares the models, and takes the first weights.

        Raises:
            WeightsError: the models differ; the sender raises it too. SyncTimeoutError: the sender is not ready; it
                may be tried again.
        """
        self._port = port
        try:
            self._take_first(port, timeout)
        except SyncTimeoutError:
            port.close()
            raise

    def _take_first(self, port: Port, timeout: float | None) -> None:
        end = None if timeout is None else time.perf_counter() + timeout
        layout = port.layout(timeout)
        if layout is None:
            raise SyncTimeoutError(f"worker {self.worker}: the sender of {self.who} was not ready within {timeout} s")
        self._layout = layout
        if self.model is None:
            self.model = {entry.name: np.zeros(entry.shape, entry.dtype) for entry in layout.entries}
        try:
            self._plan()
            if self._sharing is not None and any(entry.narrow for entry in layout.entries):
                raise UsageError(
                    "share=True and wire_dtype= exclude each other: what travels is not what the model has"
                )
        except MpiUtilError:
            port.answer("error", 0, traceback.format_exc())
            raise
        if self.receive(None if end is None else max(0.0, end - time.perf_counter())) is None:
            raise SyncTimeoutError(f"worker {self.worker}: no first weights of {self.who} within {timeout} s")

    def _plan(self) -> Plan:
        mine, senders = f"worker {self.worker}'s model", "the sender's"
        return self._plans.plan(self.model, self._layout, mine, senders)

    def receive(self, timeout: float | None) -> int | None:
        """Waits for weights newer than those here, and applies them.

        Returns:
            Their version; None if none came within `timeout` seconds, or the sender has shut down.
        """
        end = None if timeout is None else time.perf_counter() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.perf_counter())
            note = self._port.next(left, self._coalesce)
            if note is None:
                return None
            if self._take(note):
                return self.version

    def _take(self, note: Note) -> bool:
        """Applies what `note` tells of, or what is newer by now; False if that is here already."""
        if note.version <= self.version:
            self.skipped += 1
            self._port.answer("ack", self.version)
            return False
        try:
            with self.gate.changing() as waited:
                if waited and self._coalesce:
                    note = self._port.next(0, newest=True) or note  # more may have come while somebody looked
                with contextlib.ExitStack() as held:
                    version, total, block = held.enter_context(self._port.reading(note, self._sharing is not None))
                    if version < note.version:
                        raise WeightsError(
                            f"version {note.version} of {self.who} is gone: its sender failed in the next"
                        )
                    verify = len(block) <= _VERIFY_BYTES if self._verify is None else self._verify
                    if verify and checksum(block) != total:
                        raise WeightsError(f"version {version} of {self.who} came with bytes that are not its own")
                    if self._sharing is None:
                        unpack(self._plan(), block)
                    else:
                        self._sharing.point_into(self._layout, block)
                        self._plans.forget()
                        self._held.close()
                        self._held = held.pop_all()
                    self.version, self.checksum = version, total
            if self._on_update is not None:
                self._on_update(version)
        except Closed:
            return False
        except Exception:
            self._port.answer("error", note.version, traceback.format_exc())
            raise
        self._port.answer("ack", version)
        return True

    def write_to(self, model: Any) -> None:
        """From now on `model` gets the weights."""
        with self._changing("write_to"):
            if self._sharing is not None:
                raise UsageError("with share=True the model cannot be another one")
            self.model = model

    @contextlib.contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """`gate.changing` for the user's calls."""
        try:
            with self.gate.changing():
                yield
        except Closed:
            raise UsageError(f"{call} after shutdown()") from None

    def apply(self, weights: Any) -> None:
        """Sets the model's values to `weights`, whole or not at all; the version stays."""
        if not self._layout.entries:
            raise UsageError("apply_weights before connect()")
        block = np.empty(self._layout.nbytes, np.uint8)
        plan = self._layout.plan(Weights(weights), "the weights given", "the model", Weights(self.model))
        pack(plan, block)
        with self._changing("apply_weights"):
            unpack(self._plan(), block)

    def listen(self) -> None:
        """From now on a thread receives; it sleeps until something comes."""
        name = f"mpi_util weight sync: worker {self.worker}"
        self._thread = threading.Thread(target=self._listen, daemon=True, name=name)
        self._thread.start()

    @property
    def listening(self) -> bool:
        """True if a thread receives."""
        return self._thread is not None

    def _listen(self) -> None:
        while not self._port.stopped:
            try:
                self.receive(None)
            except WorkerLeftError as error:
                self.failure = error
                return
            except Exception as error:  # the sender has been told, and raises it; the old weights are in use
                self.failure = error

    def close(self) -> None:
        """Leaves in order, within `_JOIN_S` seconds."""
        self.gate.close()
        port: Port | None = getattr(self, "_port", None)
        if port is not None:
            port.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if port is not None and (self._thread is None or not self._thread.is_alive()):
            if self._sharing is not None and self.version:
                self._sharing.part()
            self._held.close()
            port.drop()
        self._plans.forget()
