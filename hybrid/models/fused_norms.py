"""RMS norms in one kernel each while a model generates on a CPU.

Written out in torch a norm is six passes over its rows, which makes norms a tenth of a decode step. What a family's
norm computes is not taken from its name: each class is tried on random numbers first, and left alone if it does
anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from hybrid.models.plans import EPSILONS
from ops.norm import rms_norm, rms_norm_reference


@dataclass(frozen=True, slots=True)
class _Formula:
    """How a class of norms computes; see `rms_norm`."""

    epsilon: str  # the attribute it is in
    offset: float
    rounds_first: bool


class FusedNorms:
    """The RMS norms of a module, which run on one kernel each between ``install`` and ``drop``."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [child for child in module.modules() if type(child).__name__.endswith("RMSNorm")]
        self._formulas: dict[type[nn.Module], _Formula | None] = {}
        self._installed: list[nn.Module] = []

    @torch.no_grad()
    def install(self) -> None:
        """Swap the norms' forward; their weights must be whole."""
        for norm in self._norms:
            kind = type(norm)
            if kind not in self._formulas:
                self._formulas[kind] = _find_formula(norm)
            formula = self._formulas[kind]
            if formula is not None:
                # An instance's attribute goes before the class's method, and hooks run around either.
                norm.forward = partial(_forward, norm, formula)
                self._installed.append(norm)

    def drop(self) -> None:
        while self._installed:
            del self._installed.pop().forward


def _forward(norm: nn.Module, formula: _Formula, hidden_states: torch.Tensor) -> torch.Tensor:
    epsilon = getattr(norm, formula.epsilon)
    if not isinstance(epsilon, float):  # one for each token: a norm whose heads are shared out over tensor ranks
        return type(norm).forward(norm, hidden_states)
    weight: torch.Tensor = norm.get_parameter("weight")
    return rms_norm(hidden_states, weight, epsilon, offset=formula.offset, rounds_first=formula.rounds_first)


def _find_formula(norm: nn.Module) -> _Formula | None:
    """What reproduces a norm on random rows and random weights, or None."""
    parameters = dict(norm.named_parameters())
    names = [name for name in EPSILONS if isinstance(getattr(norm, name, None), float)]
    if parameters.keys() != {"weight"} or parameters["weight"].ndim != 1 or len(names) != 1:
        return None
    weight = parameters["weight"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, weight.numel(), generator=generator).to(weight)
    other = torch.randn(weight.shape, generator=generator).to(weight)
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
