"""Images: the convolutional network, what scales its pixels, Atari's games, and spaces of actions that have parts."""

import sys
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, run

torch = pytest.importorskip("torch")
from policies.actor import CNN, Spec  # noqa: E402
from policies.scaler import Pixels, scaler_for  # noqa: E402
from policies.torch import modules  # noqa: E402
from trainer.config import Config  # noqa: E402
from trainer.environment import action_map, image_shape, make_env  # noqa: E402
from trainer.watch import load_policy  # noqa: E402

FIRST = Spec(3 * 24 * 32, 4, True, (), (), CNN, (3, 24, 32))
SIDES = ["tests.envs:Sides-v0", "--network", "cnn", "--batch_steps", 256, "--num_envs", 4, "--minibatches", 4]


def train(*arguments, env=None):
    done = run([sys.executable, ROOT / "train.py", *arguments], 120, {"MPI_UTIL_CURVE": "0"} | (env or {}))
    assert done.status == 0, done.err
    assert not done.err, done.err
    return done.out


def test_channels_may_be_first_or_last():
    rng = np.random.default_rng(0)
    image = rng.random((5, 3, 24, 32), np.float32)
    first = modules.Actor(FIRST, modules.init_params(FIRST, np.random.default_rng(1)))
    last = modules.Actor(replace(FIRST, image=(24, 32, 3)), first.params)
    rows = image.reshape(5, -1), np.moveaxis(image, 1, 3).reshape(5, -1)
    assert np.allclose(first.value(rows[0]), last.value(rows[1]), atol=1e-5)
    assert np.allclose(first.output(rows[0][0]), last.output(rows[1][0]), atol=1e-6)
    assert first.value(rows[0]).std() > 0.01


def test_rows_of_several_environments_have_the_bits_that_they_have_alone():
    actor = modules.Actor(FIRST, modules.init_params(FIRST, np.random.default_rng(1)))
    rows = list(np.random.default_rng(0).random((21, FIRST.obs_dim), np.float32))
    assert actor.height in (0, 4)
    if actor.height:
        whole = actor.outputs(rows)
        assert len(whole) == 21
        for i in (0, 7, 20):
            assert np.array_equal(actor.outputs(rows[i : i + 1])[0], whole[i])


def test_pixels_are_scaled_and_nothing_is_learned():
    scaler = scaler_for(FIRST)
    pixels = np.array([[0, 51, 255]], np.uint8)
    assert isinstance(scaler, Pixels) and scaler.arrays == {}
    assert np.allclose(scaler.scale(pixels), [[0.0, 0.2, 1.0]])
    scaler.update(pixels)
    scaled = modules.Scaling(scaler)(torch.tensor(pixels, dtype=torch.float32))
    assert np.array_equal(scaled.numpy(), scaler.scale(pixels))


def test_it_learns_with_the_same_bits_at_any_size_and_goes_on(tmp_path):
    found = []
    for n in (1, 3):
        arguments = ["--nprocs", n, "--run_dir", tmp_path / str(n)]
        out = train(*SIDES, "--total_steps", 3072, "--save_every", 0, "--gamma", 0, "--lr", 1e-3, *arguments)
        found.append((tmp_path / str(n) / "policy.safetensors").read_bytes())
    assert found[0] == found[1]
    last = [line for line in out.splitlines() if line.startswith("    12 ")]
    assert float(last[0].split()[3]) > 17, out  # of 20; 10 by chance
    assert "flattened" not in out

    train(*SIDES, "--total_steps", 1536, "--gamma", 0, "--lr", 1e-3, "--run_dir", tmp_path / "part")
    train("--resume", tmp_path / "part", "--total_steps", 3072, "--nprocs", 2)
    assert (tmp_path / "part" / "policy.safetensors").read_bytes() == found[0]

    policy = load_policy(tmp_path / "1")
    env = policy.make_env()
    obs, _ = env.reset(seed=3)
    assert obs.dtype == np.uint8 and policy.act(obs) == env.unwrapped.bright
    logits = policy.to_torch()(torch.tensor(obs[None], dtype=torch.float32))
    assert int(logits.argmax()) == policy.act(obs)


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
    small = refused("tests.envs:Sides-v0", "--env_kwargs", '{"size": 12}', "--network", "cnn")
    assert "uint8 of shape (12, 12, 3); --network cnn needs images of 3 dimensions and uint8, 20 x 20 at least" in small


def test_ataris_games(tmp_path):
    pytest.importorskip("ale_py")
    config = Config(env="ALE/Pong-v5", env_wrappers="atari", network="cnn")
    env = make_env(config, quiet=True)
    assert image_shape(env, config) == (4, 84, 84) and env.observation_space.dtype == np.uint8
    assert env.unwrapped._frameskip == 1  # the wrapper repeats actions
    env.close()
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


def test_parts_of_both_kinds_are_refused():
    class Mixed(gym.Env):
        observation_space, action_space = (
            SPACES.Box(-1, 1, (2,)),
            SPACES.Tuple((SPACES.Discrete(2), SPACES.Box(-1, 1, (1,)))),
        )

    gym.register("Mixed-v0", Mixed)
    with pytest.raises(ValueError, match=r"Mixed-v0: actions are Tuple.* or Tuple or Dict of such$"):
        make_env(Config(env="Mixed-v0"), quiet=True)
