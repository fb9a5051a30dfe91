"""What programs call, on both sides: the base of both schemes, and the scheme between processes of one machine."""

import contextlib
import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from mpi_util.errors import UsageError, whole_number

from .connection import Address, Deadline
from .publisher import Publisher, Worker, name_of
from .receiver import Receiver, Subscriber
from .sender import Sender, worker_indices


class WeightSyncScheme(contextlib.AbstractContextManager["WeightSyncScheme"]):
    """Base of the schemes; one for each model. Phase 1 is `init_on_sender` or `init_on_receiver`, phase 2 `connect`.

    Args:
        strategy: "state_dict" or "tensordict", as in TorchRL; both are sent in the same way.
        sync: `send` returns when every worker has the weights. False: at once.
        timeout: longest wait of `connect`, `send` and `wait_async`, in seconds; None: no limit.
        on_dead: "raise" WorkerLeftError when a worker has died, or "drop" it and continue with the others.
        per_worker_weights: of TorchRL; not needed, as `send` always takes weights by worker.

    A receiver applies the newest version, and skips those that came before it was ready. One that shuts down in order
    leaves the scheme: `send` to all continues without it.
    """

    _ranks: int | None = None  # number of workers, where the transport knows it
    _address = Address(b"", 0, "")  # of the publisher that this process connects to, once it is known
    _sender: Sender | None = None
    _receiver: Receiver | None = None
    _connected = _closed = False
    _context: Any = None  # a reference to it
    model_id: str | None = None
    worker_idx: int | None = None

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, timeout: float | None = 120.0, *,
        on_dead: str = "raise", per_worker_weights: bool = False,
    ):  # fmt: skip
        words = {"strategy": (strategy, "state_dict", "tensordict"), "on_dead": (on_dead, "raise", "drop")}
        for name, (given, *known) in words.items():
            if given not in known:
                raise UsageError(f"{name}={given!r}; use one of {', '.join(map(repr, known))}")
        self.strategy, self.sync, self.timeout, self.per_worker_weights = strategy, sync, timeout, per_worker_weights
        self._on_dead = on_dead

    def init_on_sender(
        self, *, model_id: str | None = None, model: Any = None, weights: Any = None,
        params_map: dict[int, Any] | None = None, context: Any = None, num_workers: int | None = None, ctx: Any = None,
    ) -> None:  # fmt: skip
        """Phase 1 of the sender: whose weights are sent, and to how many workers. Nothing is copied yet.

        Args:
            model_id: names the model; receivers must give the same one.
            model: torch module, Keras model, ...: anything that `rank0_bcast_wts` takes.
            weights: TensorDict, (nested) dict of arrays or tensors, list of tf.Variable; instead of `model`.
            params_map: worker -> its own weights; instead of `model`.
            context: collector of torchrl, in which `model_id` says where the model is; instead of `model`.
            num_workers: number of receivers; not needed with `params_map`, `context` or MPI.
            ctx: of torchrl; not used.

        Raises: UsageError: two arguments exclude each other, or the number of workers is not known.
        """
        self._start_role("init_on_sender")
        given = {"model_id": model_id, "model": model, "weights": weights, "params_map": params_map, "context": context}
        given = {name: value for name, value in given.items() if value is not None}
        workers = {index: Worker(index) for index in worker_indices(given, num_workers, self._ranks)}
        if context is not None:
            given |= _torchrl("context=").sender_arguments(context, model_id)
        self.model_id, self.context = model_id, context
        publisher = self._open_publisher(workers, name_of(model_id))
        self._address = publisher.address
        model = given.get("model", given.get("weights"))
        self._sender = Sender(model, given.get("params_map", {}), publisher, self._on_dead == "drop")
        # when the scheme is dropped; between ranks also before MPI ends, which may wait for workers that wait for this
        weakref.finalize(self, publisher.close).atexit = self._ranks is not None
        if context is not None:
            _torchrl("context=").shut_down_with(context, self)

    def init_on_receiver(
        self, *, model_id: str | None = None, worker_idx: int | None = None, model: Any = None, context: Any = None,
        zero_copy: bool = False, on_update: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Phase 1 of a receiver: which model of this process gets the weights. UsageError: as in `init_on_sender`.

        Args:
            model_id: as on the sender's side.
            worker_idx: this worker's index, 0 to num_workers - 1, each used by one process.
            model: written in place; of any framework, such as a dict of arrays with the same names. None: attribute
                `model` becomes such a dict.
            context: collector of torchrl, which has the model and `worker_idx`.
            zero_copy: a torch module on the CPU points into the sender's shared memory. What this process writes into
                it is private, and lost at the next update. Not if other objects hold views of its tensors (`.data`).
            on_update: called with the version after each update, before it is acknowledged, in the receiving thread.
        """
        self._start_role("init_on_receiver")
        if context is not None:
            if model is not None or model_id is None:
                needs = "context= needs model_id=, which says where the model is, and no model="
                raise UsageError(f"init_on_receiver: {needs}")
            model = _torchrl("context=").model_of(context, model_id)
            worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        index, name = self._worker_index(worker_idx), name_of(model_id)
        self.model_id, self.worker_idx, self.context = model_id, index, context
        if torchrl := _torchrl():
            torchrl.materialise(model)
            on_update = torchrl.after_update(self, on_update)
        self._receiver = Receiver(index, name, model, zero_copy, on_update)
        weakref.finalize(self, self._receiver.close).atexit = False

    def _start_role(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"{call} after shutdown(); make a new scheme")
        if self._sender is not None or self._receiver is not None:
            raise UsageError(f"{call}: this scheme has been initialised already; it has one role and one model")

    def connect(self, *, weights: Any = None, worker_idx: int | None = None, background: bool = True) -> None:
        """Phase 2, on both sides: sends the first weights to every receiver; with `context=` without waiting for them.

        Args:
            weights: sender: the first weights, instead of the model's.
            worker_idx: receiver: its index, instead of the one given before.
            background: receiver: a thread applies updates from now on. False: `receive` does.

        Raises:
            WeightsError: names, dtypes or shapes differ; on the receiver, and on the sender as WorkerError.
            UsageError: called twice, before phase 1, or by an unknown worker. Others: as in `send`.
        """
        if self._connected:
            raise UsageError("connect() was called already")
        if self._sender is not None:
            self._connected = True
            wait = self.sync and self.context is None  # its workers may have yet to start
            self._need_sender("connect()").send(weights, None, wait, Deadline(self.timeout))
            return
        if (receiver := self._receiver) is None:
            raise UsageError("connect() before init_on_sender() or init_on_receiver()")
        if worker_idx is not None:
            receiver.worker = self.worker_idx = self._worker_index(worker_idx)
        receiver.connect(self._subscribe(receiver.worker, receiver.name), self.timeout, background)
        self._connected = True

    def send(
        self, weights: Any = None, worker_ids: int | list[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """Sends weights; with `sync=True` returns when all workers they were sent to have them.

        Args:
            weights: torch module, TensorDict, (nested) dict, Keras model, list of tf.Variable, with the names, dtypes
                and shapes of the model of phase 1; None: that model. They are only read.
            worker_ids: index, or list of them; None: all workers.
            timeout: seconds, instead of the scheme's.

        Returns the version of these weights: 1 for those of `connect`, then 2, ...

        Raises:
            WeightsError: names, dtypes or shapes differ from the model's; nothing was sent.
            WorkerError: a worker could not apply them; the others have them. Without `sync` the next call raises it.
            WorkerLeftError: a worker has died (`on_dead="raise"`), or none is left.
            SyncTimeoutError: names the workers that have not answered in time; they may still do.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        return self._need_sender("send").send(weights, worker_ids, self.sync, deadline)

    def send_async(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> int:
        """Like `send`, but returns as soon as the values have been read; `wait_async` waits for the workers."""
        return self._need_sender("send_async").send(weights, worker_ids, False, Deadline(self.timeout))

    def wait_async(self, timeout: float | None = None) -> None:
        """Waits until every worker has the version sent to it last. Arguments and errors as `send`."""
        sender = self._need_sender("wait_async")
        sender.wait(sender.workers.values(), Deadline(self.timeout if timeout is None else timeout))

    @property
    def versions(self) -> dict[int, int]:
        """Sender: for each worker the version that it acknowledged last; 0 before the first."""
        sender = self._need_sender("versions")
        sender.publisher.poll(0)
        return {index: worker.acked for index, worker in sender.workers.items()}

    def _need_sender(self, call: str) -> Sender:
        if self._sender is None:
            raise UsageError(f"{call} before init_on_sender(), or on a receiver")
        if self._closed or not self._connected:
            raise UsageError(f"{call} {'after shutdown' if self._closed else 'before connect'}()")
        if self._address.pid != os.getpid():  # this process shares the sender's memory, but not its workers
            raise UsageError(f"{call}: this process was forked from the sender's; let that one send")
        return self._sender

    def _need_receiver(self, call: str) -> Receiver:
        if self._receiver is None:
            raise UsageError(f"{call} before init_on_receiver(), or on a sender")
        return self._receiver

    def receive(self, timeout: float | None = None) -> int | None:
        """Receiver, after `connect(background=False)`: waits for new weights and applies them.

        Args: timeout: seconds; 0: apply what is there; None: no limit.
        Returns the version that the model has now; None: nothing new came, it has `ended`, or a thread receives.
        Raises WorkerLeftError: the sender has died. UsageError: not connected.
        """
        receiver = self._need_receiver("receive()")
        if not self._connected or self._closed:
            raise UsageError("receive() needs connect(background=False) before, and no shutdown()")
        return receiver.receive(Deadline(timeout)) if receiver.thread is None else None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[int]:
        """Receiver: the weights do not change inside the block, such as during a rollout. Yields their version.

        An update that arrives meanwhile waits, and so does a sender that waits for it. Many threads may be inside.
        """
        with (receiver := self._need_receiver("frozen()")).lock.reading():
            yield receiver.version

    @property
    def version(self) -> int:
        """Sender: version sent last. Receiver: version that the model has. 0 before the first."""
        return self._sender.publisher.newest if self._sender else getattr(self._receiver, "version", 0)

    @property
    def ended(self) -> bool:
        """Receiver: no more weights will come: this side or the sender has shut down, or the sender has died."""
        return self.wait_ended(0)

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Receiver: waits until `ended`, `timeout` seconds at most, while a thread receives. Returns `ended`."""
        return self._need_receiver("ended").ended.wait(timeout)

    @property
    def failure(self) -> Exception | None:
        """Receiver: the last error of the thread that receives; WorkerLeftError if the sender has died."""
        return self._need_receiver("failure").failure

    @property
    def model(self) -> Any:
        """The model of this side. A receiver may be given another one with such weights; the next update sets them."""
        return getattr(self._receiver or self._sender, "model", None)

    @model.setter
    def model(self, model: Any) -> None:
        self._need_receiver("model").replace(model)

    # ---- as torchrl's collectors know a scheme: initialized is phase 1, synchronized phase 2

    @property
    def context(self) -> Any:
        """What was given as `context=`, if it still exists."""
        return self._context and self._context()

    @context.setter
    def context(self, context: Any) -> None:
        self._context = None if context is None else weakref.ref(context)

    @property
    def initialized_on_sender(self) -> bool:
        _torchrl()  # it asks this first
        return self._sender is not None

    initialized_on_receiver = property(lambda self: self._receiver is not None)
    synchronized_on_sender = property(lambda self: self._connected and self._sender is not None)
    synchronized_on_receiver = property(lambda self: self._connected and self._receiver is not None)

    def shutdown(self) -> None:
        """Ends this side in order and within seconds; in any state, and again. A receiver may miss the last version."""
        if self._closed:
            return
        self._closed = True
        for end in (self._receiver, self._sender.publisher if self._sender else None):
            if end is not None:
                end.close()

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def _worker_index(self, given: int | None) -> int:
        """This process's index. UsageError if it is not known, or not `given`."""
        if not self._address.name:
            raise UsageError("init_on_receiver: the scheme has no sender; call init_on_sender before workers get it")
        if given is None:
            raise UsageError("init_on_receiver: give worker_idx=")
        return whole_number("init_on_receiver: worker_idx", given)

    def _open_publisher(self, workers: dict[int, Worker], name: str) -> Publisher:
        return Publisher(workers, name)

    def _subscribe(self, worker: int, name: str) -> Subscriber:
        return Subscriber(self._address, worker, name)


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights from one process to others of its machine, started in any way: spawn, fork, forkserver.

    The scheme itself is given to the workers, after `init_on_sender` and before they start; what travels with it is an
    address with a key. The bytes of an update are written once, into shared memory. Arguments: `WeightSyncScheme`.
    An example: docs/weight_sync.md.
    """

    def __getstate__(self) -> dict[str, Any]:
        here = {"_sender": None, "_receiver": None, "_context": None, "_connected": False, "_closed": False}
        return vars(self) | here

    def _start_role(self, call: str) -> None:
        if self._sender is not None and self._address.pid != os.getpid():  # forked from the sender's process
            vars(self).update(self.__getstate__())
        super()._start_role(call)


def _torchrl(needed_for: str = "") -> Any:
    """The module torchrl.py, if torchrl is loaded; else None, or UsageError if something needs it."""
    if "torchrl.weight_update.weight_sync_schemes" in sys.modules:
        return importlib.import_module(".torchrl", __package__)
    if needed_for:
        raise UsageError(f"{needed_for} is a collector of torchrl, which is not loaded")
    return None
