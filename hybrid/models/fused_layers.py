"""Norms, gated MLPs and rotary embeddings of a model on a CPU in one kernel each, forward and backward, in either mode.

Written out in torch an RMS norm is six passes over its rows, SwiGLU two and a rotation five, with up to twice as many
in the backward: a tenth of a decode step, and a twentieth of an update. What a family's module or function computes is
not taken from its name: each is tried on random numbers first, and left alone if it does anything else.

They keep less for the backward than the plain modules. Per token, of bytes in bf16: a norm its input, 2 for each of its
elements in place of 6 (the input in fp32, and the normed values); an MLP gate, up and their product, 6 for each neuron
in place of 8. A rotation keeps what it did: cosines and sines.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hybrid.models.attention import current_call
from hybrid.models.plans import EPSILONS
from ops import cpu
from ops.norm import rms_norm, rms_norm_reference, takes
from ops.rotary import rotary
from ops.rotary import takes as takes_rotary
from ops.swiglu import swiglu

# Projections of an MLP, and their sizes (in, out) when it is tried.
_PROJECTIONS = {"gate_proj": (8, 24), "up_proj": (8, 24), "down_proj": (24, 8)}


@torch.no_grad()
def fuse_layers(module: nn.Module) -> int:
    """Have the RMS norms, the SwiGLU MLPs and the rotations in ``module`` run on one kernel each on a CPU. Idempotent.

    Weights may be anywhere, the meta device included: they give their shapes alone. A rotation is a function in the
    file of the model's family; what is put in its place there, for all models of the family, goes on to it outside
    ``attention_call``.

    Returns:
        how many norms and MLPs do so now; none where there are no compiled kernels.
    """
    if cpu.library() is None:
        return 0
    for name in {cls.__module__ for child in module.modules() for cls in type(child).__mro__}:
        _fuse_rotation(name)
    formulas: dict[tuple[Any, ...], _Formula | None] = {}
    count = 0
    for child in module.modules():
        if "forward" in vars(child):  # replaced by someone else
            continue
        if type(child).__name__.endswith("RMSNorm") and not isinstance(child, _FusedNorm):
            key = _signature(child)
            if key not in formulas:
                formulas[key] = _find_formula(child)
            formula = formulas[key]
            if formula is not None:
                _become(child, _norm_class(type(child), formula))
        elif child._modules.keys() >= _PROJECTIONS.keys() and not isinstance(child, _FusedMlp) and _is_swiglu(child):
            _become(child, _mlp_class(type(child)))
        count += isinstance(child, (_FusedNorm, _FusedMlp))
    return count


# -- norms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Formula:
    """How a norm computes; see `rms_norm`."""

    epsilon: str  # the attribute it is in
    offset: float
    rounds_first: bool


class _FusedNorm:
    """Goes in front of a norm's own class."""

    formula: _Formula

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        formula, weight = self.formula, self.weight
        epsilon = getattr(self, formula.epsilon)
        # Epsilons are a tensor, one for each token, in a norm whose heads are shared out over tensor ranks.
        if not isinstance(epsilon, float) or not takes(hidden_states, weight):
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        return rms_norm(hidden_states, weight, epsilon, offset=formula.offset, rounds_first=formula.rounds_first)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super().__reduce_ex__(protocol)
        return (_blank, (_norm_class, type(self).__bases__[1], self.formula), *state)


@functools.cache
def _norm_class(own: type[nn.Module], formula: _Formula) -> type[nn.Module]:
    return type(own.__name__, (_FusedNorm, own), _names(own) | {"formula": formula})


def _signature(norm: nn.Module) -> tuple[Any, ...]:
    """Norms that are alike in this compute alike."""
    plain = {name: value for name, value in vars(norm).items() if isinstance(value, (bool, int, float, str))}
    weights = [(name, tuple(each.shape), each.dtype) for name, each in norm.named_parameters()]
    return type(norm), tuple(plain.items()), tuple(weights)


def _find_formula(norm: nn.Module) -> _Formula | None:
    """What reproduces a norm on random rows and random weights, or None."""
    parameters = dict(norm.named_parameters())
    names = [name for name in EPSILONS if isinstance(getattr(norm, name, None), float)]
    if parameters.keys() != {"weight"} or parameters["weight"].ndim != 1 or len(names) != 1:
        return None
    size, dtype = parameters["weight"].numel(), parameters["weight"].dtype
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, size, generator=generator).to(dtype)
    other = torch.randn(size, generator=generator).to(dtype)
    expected = functional_call(norm, {"weight": other}, (rows,))
    if not isinstance(expected, torch.Tensor) or expected.shape != rows.shape:
        return None
    for offset in (0.0, 1.0):
        for rounds_first in (True, False):
            formula = _Formula(names[0], offset, rounds_first)
            epsilon = getattr(norm, formula.epsilon)
            found = rms_norm_reference(rows, other, epsilon, offset=offset, rounds_first=rounds_first)
            # All but a rare rounding agree: another order of rounding in 16 bits shows in every third number.
            is_equal = torch.isclose(found.float(), expected.float(), rtol=2e-6, atol=1e-6)
            if is_equal.float().mean() > 0.99 and torch.allclose(found.float(), expected.float(), rtol=0.02, atol=1e-5):
                return formula
    return None


# -- MLPs --------------------------------------------------------------------------------------------------------


class _FusedMlp:
    """Goes in front of an MLP's own class. Its projections are called, so that what hangs on them runs."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(hidden_states), self.up_proj(hidden_states)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super().__reduce_ex__(protocol)
        return (_blank, (_mlp_class, type(self).__bases__[1]), *state)


@functools.cache
def _mlp_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (_FusedMlp, own), _names(own))


def _is_swiglu(mlp: nn.Module) -> bool:
    """Whether a module is ``down(silu(gate(x)) * up(x))``, by what a copy with small projections makes of rows."""
    forward = type(mlp).forward
    if len(inspect.signature(forward).parameters) != 2 or mlp._parameters:  # itself and the hidden states
        return False
    generator = torch.Generator().manual_seed(0)
    trial = copy.copy(mlp)
    trial._modules = dict(mlp._modules)
    for name, sizes in _PROJECTIONS.items():
        trial._modules[name] = linear = nn.Linear(*sizes, dtype=torch.float32, device="cpu")
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    gate, up, down = (trial.get_submodule(name) for name in _PROJECTIONS)
    hidden = torch.randn(64, 8, generator=generator)
    try:
        output = forward(trial, hidden)
    except RuntimeError:  # it goes by sizes of its own
        return False
    expected = down(nn.functional.silu(gate(hidden)) * up(hidden))
    is_alike = isinstance(output, torch.Tensor) and output.shape == expected.shape
    return is_alike and torch.allclose(output, expected, rtol=1e-6, atol=1e-6)


# -- rotations ---------------------------------------------------------------------------------------------------

_ROTATION = "apply_rotary_pos_emb"  # what transformers' families call it
_rotations: set[Callable[..., Any]] = set()  # those that are in place of a family's own


def _fuse_rotation(file: str) -> None:
    """Have the rotation among the global names of an imported file take the kernel where it can, if there is one."""
    names = vars(sys.modules[file]) if file in sys.modules else {}
    own = names.get(_ROTATION)
    if isinstance(own, FunctionType) and own not in _rotations:
        names[_ROTATION] = _rotation(own)
    elif isinstance(own, nn.Module) and "forward" not in vars(own):
        # Since transformers 5.25 it is a module whose forward is the function, with copies of its own in each model's
        # attention that know it as the same object: so it stays, and gets another forward.
        rotation = _rotation(own.forward)
        if rotation in _rotations:
            own.forward = rotation


@functools.cache
def _rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    """What goes in the place of a family's function: itself, if it never gives what `rotary` gives."""
    dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if _rotates_alike(own, dtype)]
    if not dtypes:
        return own

    # Under its own name, by which functions are pickled.
    @functools.wraps(own)
    def rotation(*args: Any, **kwargs: Any) -> Any:
        is_flat = current_call() is not None and len(args) == 4 and not kwargs
        if is_flat and args[0].dtype in dtypes and takes_rotary(*args):
            return rotary(*args)
        return own(*args, **kwargs)

    _rotations.add(rotation)
    return rotation


def _rotates_alike(own: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Whether a function has `rotary`'s bits on random numbers, its two halves of cosines and sines unlike."""
    if list(inspect.signature(own).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 6, 3, 48), (1, 6, 2, 48), (1, 6, 48), (1, 6, 48)
    query, key, cos, sin = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    args = query.transpose(1, 2), key.transpose(1, 2), cos, sin
    try:
        found = own(*args)
    except RuntimeError:  # it goes by shapes of its own
        return False
    return isinstance(found, tuple) and len(found) == 2 and all(map(torch.equal, found, rotary(*args)))


# -- classes -----------------------------------------------------------------------------------------------------


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    # A class of its own and not a bound function: a copy of the module is then as good as the module.
    module.__class__ = cls


def _names(own: type[nn.Module]) -> dict[str, Any]:
    """A class goes under its own name, which transformers and reprs go by."""
    return {"__module__": own.__module__, "__qualname__": own.__qualname__}


def _blank(make: Any, *args: Any) -> nn.Module:
    """What a copy or a pickled module begins as: its class cannot be found by the name that it goes under."""
    cls = make(*args)
    return cls.__new__(cls)
