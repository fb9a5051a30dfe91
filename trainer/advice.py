"""Where the time of a run goes, and which --nprocs and --parallel would be faster: Amdahl's law on measured phases.

All times are wall-clock times. Rollouts are shared by all processes. With `gather` rank 0 updates on the whole machine;
with `average` the update is shared too, and every optimizer step costs an exchange among all processes. More processes
than cores help only where environments sleep, such as those that wait for another machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from trainer.config import Config

FIRST, LAST = 2, 6  # iterations that are measured; the first one warms up
WORTH = 0.2  # least gain to advise another way for, by the cautious estimate
REACHED = 0.75  # part of the ideal gain of sharing that the cautious estimate counts on
STEP_S = 3e-4  # of an optimizer step with any number of rows: overhead of some 40 operations of a framework
SLEEPS = 0.5  # an environment that sleeps gives up its core at least this often per step
PHASES = ("rollout", "gather", "update", "bcast")
Way = tuple[str, int]  # --parallel and --nprocs


@dataclass
class Measured:
    """Sums over the measured iterations, in seconds of wall-clock time unless stated otherwise.

    Attributes:
        rollout, gather, update, bcast: phases, on rank 0.
        busy: of rollouts, summed over the processes. asleep: part of it neither on a core nor waiting for one.
        sleeps: number of times that rollouts gave up their core voluntarily.
        env_steps: number of environment steps.
        steps: number of optimizer steps.
        width: number of cores that a process's update used, summed over the iterations.
        exchange: one exchange among all processes, as an optimizer step with `average` needs it.
    """

    rollout: float = 0.0
    gather: float = 0.0
    update: float = 0.0
    bcast: float = 0.0
    busy: float = 0.0
    asleep: float = 0.0
    sleeps: float = 0.0
    env_steps: int = 0
    steps: int = 0
    width: float = 0.0
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return self.rollout + self.gather + self.update + self.bcast

    @property
    def sleep_share(self) -> float:
        """Share of the rollouts in which environments slept; 0 if the host took the cores away instead."""
        slept = self.busy and self.sleeps >= SLEEPS * self.env_steps
        return min(self.asleep / self.busy, 0.999) if slept else 0.0


@dataclass(frozen=True)
class Machine:
    """What the processes share: cores that the run may use; pieces, episodes or environments, per iteration."""

    cores: int
    pieces: int

    def speed(self, n: int, sleep_share: float) -> float:
        """Speed-up of the rollouts with `n` processes over one process with a core."""
        return min(n, self.cores / (1.0 - sleep_share), self.pieces)


def estimate(measured: Measured, way: Way, now: Way, machine: Machine, reached: float = 1.0) -> float:
    """Seconds that the measured iterations would have taken another `way`; they were measured with `now`.

    Args:
        reached: part of the ideal gain of sharing that is counted on, 0 to 1.
    """
    (mode, n), (now_mode, now_n), cores = way, now, machine.cores
    if way == now:
        return measured.total

    def share(seconds: float, gain: float) -> float:
        return seconds / (1.0 + (gain - 1.0) * (reached if gain > 1.0 else 1.0))

    gain = machine.speed(n, measured.sleep_share) / machine.speed(now_n, measured.sleep_share)
    rest = share(measured.rollout, gain) + measured.gather + measured.bcast
    if mode == now_mode == "gather":
        return rest + measured.update
    exchanged = measured.steps * measured.exchange if now_mode == "average" else 0.0
    computed = max(measured.update - exchanged, 0.0)
    fixed = min(measured.steps * STEP_S, computed)
    width = now_n if now_mode == "average" else measured.width / (LAST - FIRST + 1)
    wanted = n if mode == "average" else 1  # rank 0 with `gather` may use more cores; that is not counted on
    update = fixed + share(computed - fixed, min(wanted, cores) / min(width, cores))
    exchange = measured.exchange * max(1.0, n / max(now_n, cores)) if mode == "average" else 0.0
    return rest + update + measured.steps * exchange


def advise(measured: Measured, now: Way, machine: Machine) -> str:
    """The advice, two lines. Never promises more than the advised processes can gain."""
    mode, n = now
    powers = {n, *(2**k for k in range(7) if 2**k <= 2 * max(machine.cores, n)), machine.cores}
    counts = sorted(k for k in powers if k <= max(machine.pieces, n))
    modes = ("gather", "average") if n > 1 else ("gather",)  # one process cannot measure an exchange
    ways = [now, *((m, k) for m in modes for k in counts if k > 1 or m == "gather")]
    times = {way: estimate(measured, way, now, machine, REACHED) for way in ways}
    choice = next(way for way in ways if times[way] <= (1.0 + WORTH) * min(times.values()))
    shares = ", ".join(f"{name} {getattr(measured, name) / measured.total:.0%}" for name in PHASES)
    seconds = measured.total / (LAST - FIRST + 1)
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    first = f"time: {shares} of {seconds:.2f} s an iteration, with {n} process{'es' * (n > 1)} on {cores}\n"
    rest = max(measured.total - measured.rollout, 1e-9)
    bound = f"; if rollouts took no time, the run would be {measured.total / rest:.1f} x as fast"
    bound *= mode == "gather"
    if choice == now:
        return f"{first}no other --nprocs or --parallel is expected to be clearly faster here{bound}"
    most = choice[1] / n if choice[0] == mode and choice[1] > n else choice[1]
    low, high = (min(measured.total / t, most) for t in (times[choice], estimate(measured, choice, now, machine)))
    how = f"--nprocs {choice[1]}" + f" --parallel {choice[0]}" * (choice[0] != mode)
    return f"{first}{how} is likely to be {low:.1f} to {high:.1f} x as fast{bound}"


class Advice:
    """Adds up the phases of the first iterations, and then gives its advice once."""

    def __init__(self, config: Config, n: int, cores: int):
        """Args: config: of the run. n: its number of processes. cores: that it may use."""
        pieces = config.num_envs if config.batch_steps else config.batch_size
        self.now, self.machine = (config.parallel, n), Machine(cores, pieces)
        self.iteration = 0
        self.measured = Measured()

    @property
    def needs_exchange(self) -> bool:
        """True in the iteration in which an exchange has to be measured; the same on all ranks."""
        return self.iteration == LAST - 1 and self.now[1] > 1

    def after(
        self, seconds: dict[str, float], work: Sequence[float], env_steps: int, update: tuple[int, int], exchange: float
    ) -> str:
        """Adds an iteration.

        Args:
            seconds: of the phases. work: (busy, asleep, sleeps) as in Measured. update: (steps, width).
            exchange: seconds of one, in the iteration that needs it.

        Returns:
            The advice, after the last measured iteration; else "".
        """
        self.iteration += 1
        if not FIRST <= self.iteration <= LAST:
            return ""
        values = (*(seconds[name] for name in PHASES), *work, env_steps, *update, exchange)
        for field, value in zip(fields(Measured), values):
            setattr(self.measured, field.name, getattr(self.measured, field.name) + value)
        return advise(self.measured, self.now, self.machine) if self.iteration == LAST else ""
