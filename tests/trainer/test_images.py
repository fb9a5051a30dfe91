"""Images: the convolutional network, what scales its pixels, Atari's games, and spaces of actions that have parts."""

import json
import sys
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, run

torch = pytest.importorskip("torch")
from policies.actor import CNN, Spec, channels_last  # noqa: E402
from policies.scaler import Pixels, scaler_for  # noqa: E402
from policies.torch import modules  # noqa: E402
from trainer.config import Config  # noqa: E402
from trainer.environment import action_map, image_shape, make_env  # noqa: E402
from trainer.play import load_policy  # noqa: E402

FIRST = Spec(3 * 24 * 32, 4, True, (), (), CNN, (3, 24, 32))
SIDES = ["tests.envs:Sides-v0", "--network", "cnn", "--batch_steps", 256, "--num_envs", 4, "--minibatches", 4]


def train(*arguments, env=None):
    done = run([sys.executable, ROOT / "train.py", *arguments], 120, {"MPI_UTIL_CURVE": "0"} | (env or {}))
    assert done.status == 0, done.err
    assert not done.err, done.err
    return done.out


@pytest.mark.slow
def test_channels_may_be_first_or_last():
    rng = np.random.default_rng(0)
    image = rng.random((5, 3, 24, 32), np.float32)
    first = modules.Actor(FIRST, modules.init_params(FIRST, np.random.default_rng(1)))
    last = modules.Actor(replace(FIRST, image=(24, 32, 3)), first.params)
    rows = image.reshape(5, -1), np.moveaxis(image, 1, 3).reshape(5, -1)
    assert np.allclose(first.value(rows[0]), last.value(rows[1]), atol=1e-5)
    assert np.allclose(first.output(rows[0][0]), last.output(rows[1][0]), atol=1e-6)
    assert first.value(rows[0]).std() > 0.01


def test_rows_of_several_environments_are_those_of_one():
    actor = modules.Actor(FIRST, modules.init_params(FIRST, np.random.default_rng(1)))
    rows = list(np.random.default_rng(0).random((21, FIRST.obs_dim), np.float32))
    assert actor.height in (0, 4)
    if actor.height:
        whole = actor.outputs(rows)
        assert len(whole) == 21
        for i in (0, 7, 20):
            assert np.array_equal(actor.outputs(rows[i : i + 1])[0], whole[i])


def test_channels_are_what_differs_from_two_equal_sides():
    last = {(24, 32, 3): True, (3, 24, 32): False, (40, 40, 48): True, (48, 40, 40): False, (40, 40, 40): False}
    assert {shape: channels_last(shape) for shape in last} == last


def test_pixels_are_scaled_without_their_mean():
    scaler = scaler_for(replace(FIRST, obs_dim=3))
    pixels = np.array([[0, 51, 255]], np.uint8)
    assert isinstance(scaler, Pixels)
    assert np.allclose(scaler.scale(pixels), [[0.0, 0.2, 1.0]])
    images = np.random.default_rng(0).integers(0, 256, (50, 3), np.uint8)
    for part in np.split(images, [20]):
        scaler.update(part)
    assert np.allclose(scaler.scale(images), (images - images.mean(axis=0)) / 255, atol=1e-6)
    scaled = modules.Scaling(scaler)(torch.tensor(images, dtype=torch.float32))
    assert np.array_equal(scaled.numpy(), scaler.scale(images))


def test_a_background_does_not_silence_the_network():
    """Of small changes in a bright picture the network's features change more with the mean picture than without."""
    actor = modules.Actor(FIRST, modules.init_params(FIRST, np.random.default_rng(1)))
    images = np.full((64, FIRST.obs_dim), 200, np.uint8)
    images[np.arange(64), np.random.default_rng(0).integers(0, FIRST.obs_dim, 64)] = 0
    scaler, share = scaler_for(FIRST), []
    for _ in range(2):
        values = actor.value(scaler.scale(images))
        share.append(values.std() / np.abs(values).mean())
        scaler.update(images)
    assert share[1] > 10 * share[0]


@pytest.mark.slow
def test_it_learns_with_the_same_bits_at_any_size_and_goes_on(tmp_path):
    how = [*SIDES, "--save_every", 0, "--gamma", 0, "--lr", 1e-3, "--lr_schedule", "constant"]
    out = train(*how, "--total_steps", 3072, "--nprocs", 3, "--run_dir", tmp_path / "whole")
    last = [line for line in out.splitlines() if line.startswith("    12 ")]
    assert float(last[0].split()[3]) > 17, out  # of 20; 10 by chance
    assert "flattened" not in out

    train(*how, "--total_steps", 1536, "--nprocs", 1, "--run_dir", tmp_path / "parts")
    train("--resume", tmp_path / "parts", "--total_steps", 3072, "--nprocs", 2)
    first, second = ((tmp_path / name / "policy.safetensors").read_bytes() for name in ("whole", "parts"))
    assert first == second

    policy = load_policy(tmp_path / "whole")
    env = policy.make_env()
    obs, _ = env.reset(seed=3)
    assert obs.dtype == np.uint8 and policy.act(obs) == env.unwrapped.bright
    logits = policy.to_torch()(torch.tensor(obs[None], dtype=torch.float32))
    assert int(logits.argmax()) == policy.act(obs)


@pytest.mark.slow
def test_what_is_no_image_is_refused_in_one_line():
    def refused(*arguments):
        done = run([sys.executable, ROOT / "train.py", *arguments], 60)
        assert done.status == 2 and done.err.count("\n") == 1, done.err
        return done.err

    assert "observations are float32 of shape (4,); --network cnn needs images" in refused(
        "CartPole-v1", "--network", "cnn", "--nprocs", 2
    )
    no_game = refused("CartPole-v1", "--env_wrappers", "atari")
    assert "--env_wrappers atari: " in no_game and "it needs one of Atari's games" in no_game
    for shape in ((12, 12, 3), (24, 2, 30), (30, 2, 24)):
        arguments = json.dumps({"shape": shape})
        small = refused("tests.envs:Sides-v0", "--env_kwargs", arguments, "--network", "cnn")
        assert f"uint8 of shape {shape}; --network cnn needs images of 3 dimensions and uint8, 20 x 20 at" in small
    no_wrapper = refused("CartPole-v1", "--env_wrappers", "tests.envs:wrong_network")
    assert "--env_wrappers tests.envs:wrong_network: TypeError: " in no_wrapper
    assert "it returned int, not an environment" in refused("CartPole-v1", "--env_wrappers", "builtins:id")


@pytest.mark.slow
@pytest.mark.parametrize("gives", ["float", "turned"])
def test_images_that_their_space_does_not_have_end_the_run(gives, tmp_path):
    arguments = [*SIDES, "--env_kwargs", json.dumps({"gives": gives}), "--run_dir", tmp_path / "x", "--nprocs", 2]
    done = run([sys.executable, ROOT / "train.py", *arguments], 60, {"MPI_UTIL_CURVE": "0"})
    assert done.status == 1 and "Traceback" not in done.err, done.err
    what = "float64 of shape (20, 20, 3)" if gives == "float" else "uint8 of shape (3, 20, 20)"
    assert f"train.py: an observation is {what}; its space is Box(0, 255, (20, 20, 3), uint8)" in done.err


@pytest.mark.parametrize(
    "space",
    [gym.spaces.Sequence(gym.spaces.Discrete(2)), gym.spaces.Tuple(()), gym.spaces.Box(0, 1, (0,))],
    ids=["sequence", "empty tuple", "empty box"],
)
def test_observations_of_no_fixed_length_are_refused(space):
    class Odd(gym.Env):
        observation_space, action_space = space, gym.spaces.Discrete(2)

    gym.register("Odd-v0", Odd)
    with pytest.raises(ValueError, match=r"^Odd-v0: observations are .*; a policy needs a fixed number of numbers$"):
        make_env(Config(env="Odd-v0"), quiet=True)


def test_a_policy_takes_raw_and_flat_observations(tmp_path):
    train("FrozenLake-v1", "--total_steps", 64, "--batch_steps", 64, "--num_envs", 2, "--run_dir", tmp_path / "run")
    policy = load_policy(tmp_path / "run")
    out = {state: policy.actor.output(policy.scaler.scale(np.eye(16, dtype=np.float32)[state])) for state in range(16)}
    for state in range(16):
        assert policy.act(state) == policy.act(np.eye(16, dtype=np.int64)[state]) == int(out[state].argmax())
    with pytest.raises(ValueError, match=r"^an observation of shape \(1, 16\); the policy's has \(16,\)$"):
        policy.runner.env = policy.runner.env.env  # as of a space that is flat already
        policy.act(np.zeros((1, 16)))


@pytest.mark.atari
def test_ataris_games(tmp_path):
    config = Config(env="ALE/Pong-v5", env_wrappers="atari", network="cnn")
    env = make_env(config, quiet=True)
    assert image_shape(env, config) == (4, 84, 84) and env.observation_space.dtype == np.uint8
    assert env.unwrapped._frameskip == 1  # the wrapper repeats actions
    env.close()
    make_env(replace(config, env="ale_py:ALE/Pong-v5", env_wrappers=" atari"), quiet=True).close()
    for changed in ('{"frameskip": 4}', '{"obs_type": "ram"}', '{"continuous": true}'):
        with pytest.raises(ValueError, match=r"^--env_wrappers atari: .+; it needs the game as it is, without "):
            make_env(replace(config, env_kwargs=changed), quiet=True)
    few = ["--batch_steps", 64, "--num_envs", 2, "--total_steps", 128, "--epochs", 1, "--vf_epochs", 1]
    for n in (1, 2):
        out = train("ALE/Pong-v5", "--preset", "atari", *few, "--nprocs", n, "--run_dir", tmp_path / str(n))
        assert "Stella" not in out
    same = {(tmp_path / str(n) / "policy.safetensors").read_bytes() for n in (1, 2)}
    assert len(same) == 1


SPACES = gym.spaces


@pytest.mark.parametrize(
    "space",
    [
        SPACES.Tuple((SPACES.Discrete(2, start=5), SPACES.MultiBinary((2, 1)))),
        SPACES.Dict({"b": SPACES.MultiDiscrete([2, 3]), "a": SPACES.Tuple((SPACES.Discrete(2),))}),
        SPACES.Tuple((SPACES.Box(-3, 1, (2, 2)), SPACES.Dict({"x": SPACES.Box(0, 1, (1,), np.float64)}))),
        SPACES.Tuple((SPACES.Box(-np.inf, np.inf, (2,)), SPACES.Box(0, 1, (1,)))),
    ],
    ids=["tuple", "dict", "boxes", "no bounds"],
)
def test_actions_may_have_parts(space):
    size, discrete, to_env = action_map(space)
    if discrete:
        actions = [to_env(i) for i in range(size)]
        flat = {tuple(gym.spaces.flatten(space, action).tolist()) for action in actions}
        assert len(flat) == size == (8 if isinstance(space, SPACES.Tuple) else 12)
    else:
        rng = np.random.default_rng(0)
        actions = [to_env(rng.uniform(0, 1, size).astype(np.float32)) for _ in range(3)]
        assert size == sum(np.prod(part.shape, dtype=int) for part in (space[0], SPACES.flatten_space(space[1])))
    assert all(space.contains(action) for action in actions)


def test_bounds_of_parts_are_reached():
    box = SPACES.Box(-3, 1, (2,))
    size, _, to_env = action_map(SPACES.Tuple((box, SPACES.Box(0, 1, (1,)))))
    low, high = to_env(np.full(size, -1, np.float32)), to_env(np.full(size, 9, np.float32))
    assert low[0].tolist() == [-3, -3] and low[1] == 0 and high[0].tolist() == [1, 1] and high[1] == 1


def test_each_component_has_bounds_of_its_own():
    space = SPACES.Box(np.array([-2, -np.inf, 0]), np.array([2, np.inf, np.inf]), dtype=np.float64)
    _, _, to_env = action_map(space)
    for action, expected in (([0.5, 0.5, 0.5], [1, 0.5, 0.5]), ([3, 3, -3], [2, 3, 0])):
        assert to_env(np.array(action, np.float32)).tolist() == expected
    assert to_env(np.zeros(3, np.float32)).dtype == np.float64


def test_an_environment_may_change_the_actions_that_it_gets():
    for space in (SPACES.MultiDiscrete([2, 3]), SPACES.Dict({"a": SPACES.MultiBinary(2)})):
        _, _, to_env = action_map(space)
        before = SPACES.flatten(space, to_env(3)).tolist()
        changed = to_env(3)
        (changed["a"] if isinstance(changed, dict) else changed)[...] = 0
        assert SPACES.flatten(space, to_env(3)).tolist() == before


@pytest.mark.parametrize("bound", [0.1, np.finfo(np.float64).max])
def test_actions_of_float64_stay_within_their_bounds(bound):
    box = SPACES.Box(-bound, bound, (3,), np.float64)
    for space in (box, SPACES.Tuple((box, SPACES.Box(-1, 1, (1,))))):
        size, _, to_env = action_map(space)
        for at in (-2, -1, 0.3, 1, 2):
            with np.errstate(over="ignore"):
                assert space.contains(to_env(np.full(size, at, np.float32))), at


def test_numbers_of_actions_may_begin_near_the_end_of_their_type():
    space = SPACES.Discrete(28, start=100, dtype=np.int8)
    size, _, to_env = action_map(space)
    assert [to_env(i) for i in range(size)] == list(range(100, 128))


def test_parts_of_both_kinds_are_refused():
    class Mixed(gym.Env):
        observation_space, action_space = (
            SPACES.Box(-1, 1, (2,)),
            SPACES.Tuple((SPACES.Discrete(2), SPACES.Box(-1, 1, (1,)))),
        )

    gym.register("Mixed-v0", Mixed)
    with pytest.raises(ValueError, match=r"Mixed-v0: actions are Tuple.* or Tuple or Dict of one kind$"):
        make_env(Config(env="Mixed-v0"), quiet=True)
