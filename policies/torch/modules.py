"""The networks as torch modules: the built-in ones, and a user's own, which `--network module:function` names.

The user's function gets ("policy" or "value", length of an observation, number of outputs) and returns a
torch.nn.Module that maps float32 (N, obs_dim) to (N, outputs): the means of a Gaussian or the logits of Discrete
actions, or one value. It is called on every process, and used in evaluation mode.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from policies import actor
from policies.actor import CNN, HIDDEN_GAIN, INIT_LOG_STD, OUT_GAINS, Spec
from policies.hyper import users_function
from policies.mlp import Array
from policies.scaler import CLIP, Scaler

CONVOLUTIONS = (16, 8, 4), (32, 4, 2)  # of ConvNet: channels, width of the kernel, stride
FEATURES = 256  # of its hidden layer
IMAGES = 4  # passed through the network together: 0.13 ms for each, alone 0.29; and few environments fill it


class MLP(torch.nn.ModuleList):
    """Tanh hidden layers and a linear output, with weights of shape (inputs, outputs), as the actor has them."""

    def __init__(self, sizes: tuple[int, ...]):
        """Args: sizes: widths of the layers, input and output included."""
        super().__init__(
            torch.nn.ParameterDict({"weight": torch.zeros(pair), "bias": torch.zeros(pair[1])})
            for pair in itertools.pairwise(sizes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: float32 (N, inputs). Returns: float32 (N, outputs)."""
        *hidden, last = list[Any](self)
        for layer in hidden:
            x = torch.tanh(torch.addmm(layer.bias, x, layer.weight))
        return torch.addmm(last.bias, x, last.weight)


class ConvNet(torch.nn.Module):
    """Two convolutions and a hidden layer (Mnih et al. 2013, arXiv:1312.5602), on flat rows of images."""

    def __init__(self, image: tuple[int, ...], net: str, inputs: int, outputs: int):
        """Args: image: as of Spec. net, inputs, outputs: as a user's function gets them."""
        super().__init__()
        self.image, self.channels_last = image, actor.channels_last(image)
        channels, *sizes = (image[2], *image[:2]) if self.channels_last else image
        layers: list[Any] = []
        for out, kernel, stride in CONVOLUTIONS:
            layers += [torch.nn.Conv2d(channels, out, kernel, stride), torch.nn.ReLU()]
            channels, sizes = out, [(size - kernel) // stride + 1 for size in sizes]
        layers += [torch.nn.Flatten(), torch.nn.Linear(channels * math.prod(sizes), FEATURES), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(FEATURES, outputs))
        for layer in self.layers:
            if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
                torch.nn.init.orthogonal_(layer.weight, OUT_GAINS[net] if layer is self.layers[-1] else HIDDEN_GAIN)
                torch.nn.init.zeros_(layer.get_parameter("bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: float32 (N, inputs). Returns: float32 (N, outputs)."""
        images = x.unflatten(1, self.image)
        images = images.permute(0, 3, 1, 2) if self.channels_last else images
        if torch.is_grad_enabled():  # an update takes 0.6 of the time in this layout, but acting 1.2
            images = images.contiguous(memory_format=torch.channels_last)
        return self.layers(images)


class Scaling(torch.nn.Module):
    """What a Scaler does to observations."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, scaler: Scaler):
        super().__init__()
        self.register_buffer("mean", torch.tensor(scaler.mean))
        self.register_buffer("scale", torch.tensor(scaler.factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: float32 (N, obs_dim), as the environment gives them. Returns: the same, scaled."""
        return ((x - self.mean) * self.scale).clamp(-CLIP, CLIP)


def build(spec: Spec, net: str, seed: int = 0) -> torch.nn.Module:
    """The module of a network, "policy" or "value".

    Args: seed: of torch's random numbers in the user's function: buffers, which are not sent, are the same everywhere.
    Raises: ValueError: one line: the user's function cannot be found, fails, or returns something else than it should.
    """
    if not spec.network:
        return MLP(spec.sizes(net))
    what, outputs = f"--network {spec.network}", spec.sizes(net)[-1]
    make = functools.partial(ConvNet, spec.image) if spec.network == CNN else users_function("--network", spec.network)
    try:
        module, again = (_made(make, net, spec.obs_dim, outputs, seed) for _ in range(2))
        _check(module, again.state_dict(), (spec.obs_dim, outputs))
        if net == "policy" and not spec.discrete and "log_std" in dict(module.named_parameters()):
            raise ValueError("its parameter log_std has the name of the policy's own log_std; give it another one")
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: the {net} network: {type(error).__name__}: {error}") from error
    return module


def _made(make: Callable[[str, int, int], Any], net: str, inputs: int, outputs: int, seed: int) -> torch.nn.Module:
    """The user's module with its initial numbers, which share no memory with another module's."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # so that whatever a module computes here can be copied
        torch.manual_seed(seed)
        module = copy.deepcopy(make(net, inputs, outputs))
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"the function returned {type(module).__name__}, not a torch.nn.Module")
        module.float().eval()(torch.zeros(2, inputs))  # lazy layers draw their numbers now
        return module


def _check(module: torch.nn.Module, again: dict[str, Any], shape: tuple[int, int]) -> None:
    """Raises an error, one line, if a learner cannot use the module. Args: again: the state of one made like it."""
    if not dict(module.named_parameters()):
        raise ValueError("it has no parameters")
    for key, parameter in module.named_parameters():
        if not (parameter.requires_grad and parameter.is_floating_point()):
            raise ValueError(f"its {key} requires no gradient, or is no real number; register it as a buffer")
    rows = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(0))
    given = rows.clone()
    out, repeated, singly = module(rows), module(rows), [module(row) for row in rows.split(1)]
    if not (isinstance(out, torch.Tensor) and out.requires_grad):
        raise TypeError(f"it returned {type(out).__name__} without a gradient, not a tensor with one")
    if out.shape != (2, shape[1]):
        raise ValueError(f"it maps (2, {shape[0]}) to {tuple(out.shape)}; it must be (2, {shape[1]})")
    if not out.isfinite().all() or not torch.equal(rows, given):
        raise ValueError("its output is not finite, or it changes the rows that it gets")
    if not torch.equal(out, repeated) or not torch.allclose(out, torch.cat(singly), rtol=1e-3, atol=1e-5):
        raise ValueError("its output must depend on its own row alone, and on no random numbers")
    if other := [key for key, value in module.state_dict().items() if not torch.equal(value, again[key])]:
        raise ValueError(f"its {other[0]} differs when the network is made again or used; torch's seed must decide it")


def named_parameters(module: torch.nn.Module, net: str) -> dict[str, torch.nn.Parameter]:
    """A module's parameters under the names that they have in weights and checkpoints, such as policy/body/0/weight."""
    return {f"{net}/{key.replace('.', '/')}": parameter for key, parameter in module.named_parameters()}


def init_params(spec: Spec, rng: np.random.Generator, log_std: float = INIT_LOG_STD) -> dict[str, Array]:
    """Initial parameters of the user's networks. Args and returns: as policies.actor.init_params."""
    params: dict[str, Array] = {}
    for net in ("policy", "value"):
        module = build(spec, net, int(rng.integers(2**31)))
        params |= {key: p.detach().numpy().copy() for key, p in named_parameters(module, net).items()}
    if not spec.discrete:
        params["policy/log_std"] = np.full(spec.act_dim, log_std, np.float32)
    return params


class Actor(actor.Actor):
    """See policies.actor.Actor; with the user's networks, whose parameters are the arrays of `params`."""

    def __init__(self, spec: Spec, params: dict[str, Array]):
        self.spec, self.params = spec, params
        self.modules = {net: build(spec, net) for net in ("policy", "value")}
        torch.set_num_threads(1)  # with another number products may have other last bits; only learners change it
        for net, module in self.modules.items():
            for key, parameter in named_parameters(module, net).items():
                parameter.data = torch.from_numpy(params[key])
        self.refresh()
        if spec.image:
            self.height = next(filter(self._places_agree, [IMAGES]), 0)

    def output(self, obs: Array) -> Array:
        return self._forward("policy", obs[None])[0]

    @torch.no_grad()
    def _forward(self, net: str, obs: Array) -> Array:
        return self.modules[net](torch.from_numpy(obs)).numpy()
