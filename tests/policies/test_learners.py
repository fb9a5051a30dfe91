"""The learners, with each backend: they agree with the actor, learn, resume, and refuse what is not finite."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
from conftest import ROOT
from learning import ALGOS, BACKENDS, BOTH, BOX, DISCRETE, FIELDS, N, Rank0, a_batch, assert_same_bits, entropy, module

from policies.actor import init_params
from policies.backend import as_array, n_threads
from policies.data_parallel import Part
from policies.hyper import Hyper
from policies.learner import n_minibatches, shuffled, stream
from policies.learners import Learners
from trainer.command_line import parse


@BOTH
@BACKENDS
def test_actor_and_learner_agree(backend, spec):
    rank0 = Rank0(backend, spec)
    for seed in range(3):
        obs, act, adv, ret = batch = rank0.batch(seed)
        actor, rows = rank0.actor, rank0.policy.net.rows(obs, act, adv, None)
        old_logp = as_array(rows.fields[3])
        np.testing.assert_allclose(actor.logp(obs, act), old_logp, atol=1e-5)
        _, summed, loss, n_clipped = rank0.policy.net.outcome(rows).sums
        assert entropy(actor, obs).sum() == pytest.approx(summed, rel=1e-5)
        assert (loss, n_clipped) == (pytest.approx(-adv.sum(), rel=1e-4), 0)
        np.testing.assert_allclose(actor.value(obs), rank0.value.net.values(rank0.value.net.rows(obs, ret)), atol=1e-5)
        before = {key: array.copy() for key, array in rank0.params.items()}
        rank0.learn(batch)
        assert all((before[key] != array).any() for key, array in rank0.params.items())


@BOTH
@ALGOS
@BACKENDS
def test_update_lowers_the_surrogate_and_reports_its_divergence(backend, algo, spec):
    rank0 = Rank0(backend, spec, algo, lr=3e-3)
    obs, act, adv, _ = batch = rank0.batch(0)
    old_logp = rank0.actor.logp(obs, act)
    rank0.update(*batch)
    ratio = np.exp(rank0.actor.logp(obs, act) - old_logp)
    loss = -(ratio * (adv - adv.mean()) / adv.std()).mean()
    assert loss < (-0.001 if algo == "ppo-kl" else -0.01)
    assert rank0.log["LossPi"] == pytest.approx(loss, abs=1e-5)
    assert rank0.log["Entropy"] == pytest.approx(entropy(rank0.actor, obs).mean(), abs=1e-5)
    assert 0.0 < rank0.log["KL"] < 0.5


@BOTH
@ALGOS
@BACKENDS
def test_ratios_are_taken_to_the_policy_that_acted(backend, algo, spec):
    """The divergence, which steers the update, to the one that is updated."""
    rank0 = Rank0(backend, spec, algo, lr=3e-3)
    obs, act, adv, _ = batch = rank0.batch(0)
    acted, now = rank0.actor.logp(obs, act), {}
    rank0.learn(rank0.batch(1))
    assert np.abs(rank0.actor.logp(obs, act) - acted).max() > 1e-3
    saved, old = rank0.state(), rank0.actor.logp(obs, act)
    for name, logp in {"none": None, "current": old, "acted": acted}.items():
        rank0.load_state(saved)
        rank0.update(*batch, logp=logp)
        now[name] = rank0.log
    ratio = np.exp(rank0.actor.logp(obs, act) - acted)
    assert now["acted"]["LossPi"] == pytest.approx(-(ratio * (adv - adv.mean()) / adv.std()).mean(), abs=1e-5)
    assert now["none"] == pytest.approx(now["current"], rel=1e-3, abs=1e-5)
    assert now["acted"] != pytest.approx(now["current"], rel=1e-3, abs=1e-5)
    assert 0.0 < now["acted"]["KL"] < 0.5


@BACKENDS
def test_log_probabilities_that_are_wrong_are_refused(backend):
    rank0 = Rank0(backend, BOX)
    obs, act, adv, _ = a_batch(BOX, 0)
    before, logp = rank0.state(), np.full(N, np.nan, np.float32)
    with pytest.raises(FloatingPointError, match=r"^(KL|LossPi) is nan after the update$"):
        rank0.policy.update(obs, act, adv, logp=logp)
    with pytest.raises(ValueError, match=r"^expected an array of shape \(150,\), got \(9,\)$"):
        rank0.policy.update(obs, act, adv, logp=np.zeros(9, np.float32))
    assert_same_bits([rank0.state(), before])


@BOTH
@ALGOS
@BACKENDS
@pytest.mark.slow_if(backend="torch")
def test_policy_solves_a_bandit(backend, algo, spec):
    rank0 = Rank0(backend, spec, algo, lr=5e-3 if algo == "vpg" else 1e-2, kl_targ=0.02 if algo == "ppo-kl" else None)
    first = rank0.batch(0)[2].mean()
    for seed in range(60):
        rank0.update(*rank0.batch(seed))
    last = rank0.batch(999)[2].mean()
    assert (first < 0.3 and last > 0.9) if spec.discrete else (first < -1.0 and last > -0.4)


@ALGOS
@BACKENDS
def test_value_function_fits(backend, algo):
    rank0 = Rank0(backend, BOX, algo, vf_lr=1e-2)
    for seed in range(20):
        obs, _, _, ret = a_batch(BOX, seed)
        log = rank0.value.fit(obs, ret)
    rank0.export()
    assert log["LossV"] == pytest.approx(np.square(rank0.actor.value(obs) - ret).mean(), rel=1e-3)
    assert log["LossV"] < 0.02
    assert log["ExplainedVar"] > 0.9


def elsewhere(array):
    """The same numbers in memory that starts at 4 bytes past a cache line, every other row of it."""
    room = np.zeros(2 * array.nbytes + 128, np.uint8)
    room = room[4 - room.ctypes.data % 64 + 64 :][: 2 * array.nbytes].view(array.dtype)
    shifted = room.reshape(len(array), 2, *array.shape[1:])[:, 1]
    shifted[...] = array
    return shifted


@BOTH
@ALGOS
@BACKENDS
def test_same_bits_on_repeat_and_at_any_alignment(backend, algo, spec):
    ends, kept = [], []
    for place in (np.copy, elsewhere):
        rank0 = Rank0(backend, spec, algo)
        logs = []
        for seed in range(3):
            batch = [place(array) for array in a_batch(spec, seed)]
            logs.append(rank0.learn(batch))
            for array in batch:
                array[...] = 0  # the next batch may come to lie here
            kept.append(np.empty(seed * 4 + 1000, np.uint8))  # the next arrays come to lie elsewhere
        ends.append((*rank0.state(), logs))
    assert ends[0][2] == ends[1][2]
    assert_same_bits([end[:2] for end in ends])


@BOTH
@ALGOS
@BACKENDS
def test_resumed_learners_go_on_to_the_same_bits(backend, algo, spec):
    rank0, other = Rank0(backend, spec, algo), Rank0(backend, spec, algo, number=1)
    for seed in range(2):
        rank0.learn(a_batch(spec, seed))
    saved = rank0.state()
    kept = ({key: array.copy() for key, array in saved[0].items()}, dict(saved[1]))
    other.load_state(saved)
    assert_same_bits([other.state(), saved])
    for seed in range(2, 5):
        assert rank0.learn(a_batch(spec, seed)) == other.learn(a_batch(spec, seed))
    assert_same_bits([rank0.state(), other.state()])
    assert_same_bits([saved, kept])


@BACKENDS
def test_what_learners_are_given_is_copied(backend):
    rank0 = Rank0(backend, BOX, "ppo-kl")
    rank0.learn(a_batch(BOX, 0))
    arrays, scalars = rank0.state()
    given = {key: array.copy() for key, array in arrays.items()}
    rank0.load_state((given, scalars))
    for array in (*given.values(), *rank0.params.values()):
        array[...] = np.nan
    assert_same_bits([rank0.state(), (arrays, scalars)])


@BOTH
@ALGOS
@BACKENDS
def test_a_number_that_is_not_finite_raises_and_changes_nothing(backend, algo, spec):
    rank0 = Rank0(backend, spec, algo)
    rank0.learn(a_batch(spec, 0))
    before = rank0.state()
    for field, name in enumerate(FIELDS):
        batch = a_batch(spec, 1)
        if batch[field].dtype != np.float32:
            continue
        batch[field].flat[7] = np.nan
        obs, act, adv, ret = batch
        line = "is nan after the update$"
        if name != "ret":
            with pytest.raises(FloatingPointError, match=line):
                rank0.policy.update(obs, act, adv)
        if name in ("obs", "ret"):
            with pytest.raises(FloatingPointError, match=line):
                rank0.value.fit(obs, ret)
    assert_same_bits([rank0.state(), before])


@ALGOS
@BACKENDS
@pytest.mark.filterwarnings("error")
def test_a_loss_that_overflows_raises_and_changes_nothing(backend, algo):
    rank0 = Rank0(backend, BOX, algo)
    rank0.learn(a_batch(BOX, 0))
    before = rank0.state()
    obs, act, adv, ret = a_batch(BOX, 1)
    with pytest.raises(FloatingPointError, match=r"not finite|is nan|is inf"):
        rank0.value.fit(obs, ret * 1e30)
    act[3] = 1e25
    with pytest.raises(FloatingPointError, match=r"not finite|is nan|is inf"):
        rank0.policy.update(obs, act, adv)
    assert_same_bits([rank0.state(), before])


def test_parameters_that_are_not_finite_raise_where_the_loss_is(monkeypatch):
    rank0 = Rank0("numpy", BOX)
    before, net, step = rank0.state(), rank0.policy.net, rank0.policy.net.step

    def saturate(grad, lr):
        step(grad, lr)
        vector = net.vector()
        net.by_name(vector)["policy/0/bias"][0] = np.inf  # of which tanh is 1
        net.set_vector(vector)

    monkeypatch.setattr(net, "step", saturate)
    with pytest.raises(FloatingPointError, match=r"^the policy update's loss or gradient is not finite$"):
        rank0.update(*a_batch(BOX, 0))
    assert_same_bits([rank0.state(), before])


@BACKENDS
def test_any_failure_is_undone(backend, monkeypatch):
    rank0 = Rank0(backend, BOX)
    before, values = rank0.state(), rank0.value.net.values

    def interrupted(*_):
        assert rank0.policy.net.steps or rank0.value.net.steps
        raise KeyboardInterrupt

    monkeypatch.setattr(rank0.policy, "compare", interrupted)
    monkeypatch.setattr(rank0.value.net, "values", lambda x: (interrupted if rank0.value.net.steps else values)(x))
    obs, act, adv, ret = a_batch(BOX, 0)
    for call in (lambda: rank0.policy.update(obs, act, adv), lambda: rank0.value.fit(obs, ret)):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert_same_bits([rank0.state(), before])


@BACKENDS
def test_parameters_that_do_not_fit_are_refused(backend):
    rank0 = Rank0(backend, BOX)
    before = rank0.state()
    line = r"^policy/0/weight: expected an array of shape \(6, 16\), got \(4, 16\)$"
    with pytest.raises(ValueError, match=line):
        rank0.learners.load_state(*Rank0(backend, DISCRETE).state())
    with pytest.raises(ValueError, match=line):
        Learners(module(backend), BOX, Rank0(backend, DISCRETE).params, Hyper())
    missing = {key: array for key, array in before[0].items() if key != "policy/log_std"}
    with pytest.raises(ValueError, match=r"^policy/log_std: expected an array of shape \(3,\), got nothing$"):
        rank0.learners.load_state(missing, before[1])
    assert_same_bits([rank0.state(), before])


@BOTH
@BACKENDS
def test_arrays_of_another_shape_are_refused(backend, spec):
    rank0 = Rank0(backend, spec)
    before = rank0.state()
    obs, act, adv, ret = a_batch(spec, 0)
    narrow_act = act[:, None] if spec.discrete else act[:, :1]
    for arrays in ((obs[:, :1], act, adv), (obs, narrow_act, adv), (obs, act, adv[:, None]), (obs, act, adv[:9])):
        with pytest.raises(ValueError, match=r"^expected an array of shape \("):
            rank0.policy.update(*arrays)
    for arrays in ((obs[:, :1], ret), (obs, ret[:, None]), (obs, ret[:9]), (obs[:9], ret, Part.whole(N))):
        with pytest.raises(ValueError, match=r"^expected an array of shape \("):
            rank0.value.fit(*arrays)
    with pytest.raises(ValueError, match=r"^expected an array of shape \(9,\)"):
        rank0.value.fit(obs, ret, Part.whole(9))
    assert_same_bits([rank0.state(), before])


NO_SUCH_DEVICE = "TensorFlow has no such device here; it has: cpu"


@pytest.mark.parametrize(
    "backend, device, line",
    [
        ("numpy", "cuda", "NumPy computes on the cpu; --framework torch uses other devices"),
        ("torch", "cuda:7", "CUDA"),
        ("torch", "gpu", "Expected one of cpu, cuda"),
        pytest.param("tf", "cuda:7", NO_SUCH_DEVICE, marks=pytest.mark.tensorflow),
        pytest.param("tf", "gpu:7", NO_SUCH_DEVICE, marks=pytest.mark.tensorflow),
        pytest.param("tf", "xpu", NO_SUCH_DEVICE, marks=pytest.mark.tensorflow),
    ],
)
def test_a_device_that_is_not_there_is_refused(backend, device, line):
    with pytest.raises(RuntimeError, match=f"^.*{line}.*$"):
        Learners(module(backend), BOX, init_params(BOX, np.random.default_rng(0)), Hyper(), 1, device)


@ALGOS
@BACKENDS
def test_advantages_that_are_all_alike_are_no_reason_to_move(backend, algo):
    rank0 = Rank0(backend, BOX, algo)
    obs, act, adv, _ = rank0.batch(0)
    rank0.update(obs, act, np.full_like(adv, 3.0))
    assert rank0.log["KL"] == pytest.approx(0.0, abs=1e-6)


@ALGOS
@BACKENDS
def test_unit_of_the_advantages_does_not_matter(backend, algo):
    logs = []
    for unit, mean in ((1.0, 0.0), (100.0, 7.0)):
        rank0 = Rank0(backend, BOX, algo)
        obs, act, adv, _ = rank0.batch(0)
        rank0.update(obs, act, unit * adv + mean)
        logs.append(rank0.log)
    assert logs[0] == pytest.approx(logs[1], rel=1e-3, abs=1e-5)


@BACKENDS
def test_step_sizes_are_scaled(backend):
    states, default = [], Hyper.of("ppo")
    for scale, settings in ((0.5, {}), (1.0, {"lr": default.lr / 2, "vf_lr": default.vf_lr / 2}), (1.0, {})):
        rank0 = Rank0(backend, BOX, **settings)
        rank0.policy.lr_scale = rank0.value.lr_scale = scale
        rank0.learn(a_batch(BOX, 0))
        states.append(rank0.state())
    assert_same_bits(states[:2])
    assert (states[0][0]["policy/0/weight"] != states[2][0]["policy/0/weight"]).any()


@BACKENDS
def test_deviations_have_bounds(backend):
    for least, most in ((-0.502, 0.0), (-9.0, -1.5), (-9.0, 0.0)):
        rank0, free = (Rank0(backend, BOX, number=i) for i in range(2))
        rank0.policy.log_std_range = np.full(3, least, np.float32), np.float32(most)
        for one in (rank0, free):
            one.learn(batch := a_batch(BOX, 0))
            assert one.log["Entropy"] == pytest.approx(entropy(one.actor, batch[0]).mean(), abs=1e-5)
        assert [rank0.log[name] for name in ("KL", "LossPi")] == [free.log[name] for name in ("KL", "LossPi")]
        (mine, _), (others, _) = rank0.state(), free.state()
        for name in others:
            expected = np.clip(others[name], least, most) if name == "policy/log_std" else others[name]
            assert np.array_equal(mine[name], np.asarray(expected, mine[name].dtype))


def test_settings_that_are_given_are_kept():
    hyper = Hyper.of("ppo-kl", epochs=3, kl_targ=0.01, seed=4, lr=None)
    assert (hyper.epochs, hyper.kl_targ, hyper.seed, hyper.lr) == (3, 0.01, 4, 1.1e-4)
    assert None not in vars(hyper).values()


@pytest.mark.parametrize(
    "algo, own",
    [
        ("ppo", {"lr": 0.1, "epochs": 3, "clip": 0.3, "minibatch_rows": 6}),
        ("trpo", {"cg_iters": 7, "cg_damping": 0.7, "minibatches": 5}),
    ],
)
def test_the_command_line_reaches_the_learners(algo, own):
    given = own | {"vf_lr": 0.2, "vf_epochs": 4, "kl_targ": 0.4, "ent_coef": 0.5, "max_grad_norm": 0.6, "seed": 8}
    hyper = parse(["Env-v0", "--algo", algo, *(f"--{key}={value}" for key, value in given.items())])
    assert {key: getattr(hyper, key) for key in given} == given
    rest = vars(Hyper.of(algo)).keys() - given
    assert {key: getattr(hyper, key) for key in rest} == {key: getattr(Hyper.of(algo), key) for key in rest}


@pytest.mark.parametrize(
    "option, line",
    [
        ("--kl_targ=0", "--kl_targ is 0.0; it must be above 0"),
        ("--vf_lr=0", "--vf_lr is 0.0; it must be above 0"),
        ("--max_grad_norm=nan", "--max_grad_norm is nan; it must be above 0"),
        ("--std_fall=1e30", "--std_fall is 1e+30; it must be between 0 and 10"),
        ("--cg_iters=0", "--cg_iters is 0; it must be 1 or more"),
        ("--cg_damping=-1", "--cg_damping is -1.0; it must be 0 or more"),
        ("--minibatch_rows=0", "--minibatch_rows is 0; it must be 1 or more"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(option, line, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["Env-v0", "--algo", "trpo", option])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"train.py: {line} (see --help)\n"


def test_every_update_of_every_learner_has_its_own_stream():
    draws = [stream(*key).integers(1 << 60) for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert len(set(draws)) == 4
    assert stream(0, 0, 1).integers(1 << 60) == draws[1]


def test_minibatches_are_dealt_out_without_remainder():
    rows, sizes = zip(*shuffled(np.random.default_rng(0), Part.whole(103), 10))
    assert [len(r) for r in rows] == list(sizes) == 3 * [11] + 7 * [10]
    assert sorted(np.concatenate(rows)) == list(range(103))
    assert n_minibatches(Hyper(minibatches=4, minibatch_rows=10), 103) == 4
    assert n_minibatches(Hyper(minibatches=0, minibatch_rows=10), 103) == 10
    assert n_minibatches(Hyper(minibatches=32, minibatch_rows=10), 3) == 3
    assert n_minibatches(Hyper(minibatches=0, minibatch_rows=10), 3) == 1


@pytest.mark.parametrize("available, rows, expected", [(8, 100, 1), (8, 100_000, 8), (1, 100_000, 1)])
def test_threads_follow_the_works_size(available, rows, expected):
    assert n_threads(available, rows, 30_000) == expected


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_threads_of_an_update_are_restored(backend):
    rank0 = Rank0(backend, BOX, threads=2)
    net = rank0.policy.net
    with threadpoolctl.threadpool_limits(2) if backend == "numpy" else net.using(2):
        before = threads_now(backend)
        assert before == 2
        obs, act, adv, _ = a_batch(BOX, 0)
        compare, during = rank0.policy.compare, []
        rank0.policy.compare = lambda batch: (during.append(threads_now(backend)), compare(batch))[1]
        rank0.policy.update(obs, act, adv)
        del rank0.policy.compare
        assert set(during) == {1}
        with pytest.raises(FloatingPointError):
            rank0.policy.update(obs, act, np.nan * adv)
        assert threads_now(backend) == before


def threads_now(backend):
    """The number of threads that the backend's library has."""
    if backend == "torch":
        return module(backend).nets.torch.get_num_threads()
    (blas,) = (pool for pool in module(backend).nets.BLAS.info() if "numpy" in pool["filepath"])
    return blas["num_threads"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_fit_in_a_child_has_the_bits_of_one_after_the_other(monkeypatch):
    monkeypatch.setattr("policies.learners.STEPS_TO_FORK", 0)
    made = []
    for threads in (1, 2):  # with one thread there is no child
        rank0 = Rank0("numpy", BOX, threads=threads, algo="ppo-kl")
        logs = [rank0.learn(a_batch(BOX, seed)) for seed in range(3)]
        forked = rank0.learners._forked
        assert forked is None if threads == 1 else forked._room.any()  # where the child leaves its numbers
        made.append((logs, rank0.state()))
    assert made[0][0] == made[1][0]
    assert_same_bits([made[0][1], made[1][1]])


@pytest.mark.parametrize("how", ["killed", "no process", "nobody's"])
def test_a_child_that_is_lost_changes_nothing(monkeypatch, how):
    expected, rank0 = Rank0("numpy", BOX, threads=1), Rank0("numpy", BOX, threads=2)
    parent, fit = os.getpid(), rank0.value.fit

    def half_a_fit(*arguments):
        rank0.value.net._vectors[0][:5] = np.nan
        os.kill(os.getpid(), signal.SIGKILL)

    def no_process():
        raise BlockingIOError("no more processes")

    if how == "killed":
        monkeypatch.setattr(rank0.value, "fit", lambda *a: half_a_fit() if os.getpid() != parent else fit(*a))
    elif how == "no process":
        monkeypatch.setattr(os, "fork", no_process)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if how == "nobody's" else signal.SIG_DFL)
    try:
        for seed in range(2):
            assert rank0.learn(a_batch(BOX, seed)) == expected.learn(a_batch(BOX, seed))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert_same_bits([rank0.state(), expected.state()])


def test_a_policy_that_fails_leaves_the_value_function_as_it_was():
    rank0 = Rank0("numpy", BOX, threads=2)
    before = rank0.state()
    obs, act, adv, ret = a_batch(BOX, 0)
    with pytest.raises(FloatingPointError):
        rank0.learn([obs, act, np.nan * adv, ret])
    assert_same_bits([rank0.state(), before])
    with pytest.raises(FloatingPointError, match="ExplainedVar is nan"):
        rank0.learn([obs, act, adv, np.nan * ret])


def test_a_child_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr("policies.backend.n_threads", lambda available, rows, n_params: 2 if rows > 100 else 1)
    rank0, expected = Rank0("numpy", BOX, threads=2), Rank0("numpy", BOX, threads=2)
    monkeypatch.setattr(expected.learners, "_forked", None)
    for _ in range(2):
        for each in (rank0, expected):
            each.value.fit(*a_batch(BOX, 0)[::3])  # starts the threads of this process
            each.learn(a_batch(BOX, 1))
    assert_same_bits([rank0.state(), expected.state()])


def test_a_child_ends_with_its_parent(tmp_path):
    program = (
        "import os, time\nimport numpy as np\nfrom policies.forked import Forked\n"
        "Forked(1).start(lambda: time.sleep(60))\n"
        "print(*open(f'/proc/self/task/{os.getpid()}/children').read().split(), flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
