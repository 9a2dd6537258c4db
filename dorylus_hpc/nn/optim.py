"""Optimizers: SGD and Adam, in place and strictly elementwise.

Every element of a tensor is updated from its own gradient and its own state with correctly rounded
operations only (+, -, *, /, sqrt). So a tensor may be cut over its owners in any way, or updated in
blocks as is done here to stay in cache and off the allocator, and not one bit changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

_BLOCK = 8192  # elements a pass: all arrays of a block fit in a core's L2


def _check_number(name: str, value: float, *, zero: bool) -> float:
    value = float(value)
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number {'>= 0' if zero else '> 0'}, got {value}")
    return value


class Optimizer(ABC):
    """Updates one tensor at a time; holds the hyper-parameters, never the state.

    Attributes
    ----------
    kind : str
        The name `make_optimizer` knows it by.
    slots : tuple of str
        Names of the state arrays, each of the tensor's shape and dtype.
    lr : float
        Learning rate.
    """

    kind: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()

    def __init__(self, lr: float) -> None:
        self.lr = _check_number("lr", lr, zero=False)

    def init(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> dict[str, np.ndarray]:
        """Return the state before the first step: an array of zeros for each of `slots`."""
        return {slot: np.zeros(shape, dtype) for slot in self.slots}

    def step(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        state: dict[str, np.ndarray],
        step_number: int,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        """Update `param` and `state` in place.

        Parameters
        ----------
        param : ndarray
            float32 or float64, C-contiguous, any shape: a whole tensor or any piece of one.
        grad : ndarray
            Gradient of the loss, like `param`; not changed.
        state : dict of ndarray
            From `init` or an earlier step (or the same piece of it), like `param`.
        step_number : int
            The update this is, from 1.
        weight_decay : float
            L2 decay: ``weight_decay * param`` is added to the gradient. Meant for weights, not biases.

        Raises
        ------
        TypeError
            Arrays that are no float32/float64 arrays, or differ in dtype.
        ValueError
            Arrays that differ in shape or are not C-contiguous, a state of other slots, a step
            number below 1, a negative decay.
        """
        weight_decay = _check_number("weight_decay", weight_decay, zero=True)
        if step_number < 1:
            raise ValueError(f"step_number counts from 1, got {step_number}")
        if set(state) != set(self.slots):
            raise ValueError(f"the state of {self.kind} has the slots {self.slots}, got {sorted(state)}")
        arrays = {"param": param, "grad": grad, **state}
        _check_alike(arrays)
        flat = [array.reshape(-1) for array in (param, grad, *(state[slot] for slot in self.slots))]
        rates = [param.dtype.type(rate) for rate in self._rates(step_number)]
        decay = param.dtype.type(weight_decay)
        g_block, scratch = np.empty((2, min(_BLOCK, param.size)), param.dtype)
        for start in range(0, param.size, _BLOCK):
            p, g, *slots = (array[start : start + _BLOCK] for array in flat)
            if weight_decay:
                g = np.add(np.multiply(p, decay, out=g_block[: p.size]), g, out=g_block[: p.size])
            self._update(p, g, slots, rates, scratch[: p.size])

    @abstractmethod
    def _rates(self, step_number: int) -> tuple[float, ...]:
        """Scalars of this step, in double precision."""

    @abstractmethod
    def _update(
        self, p: np.ndarray, g: np.ndarray, slots: list[np.ndarray], rates: list, scratch: np.ndarray
    ) -> None:
        """One block in place; `rates` are those of `_rates` in the dtype of the block."""


class Sgd(Optimizer):
    """Plain gradient descent: ``param -= lr * grad``."""

    kind = "sgd"

    def _rates(self, step_number: int) -> tuple[float, ...]:
        return (self.lr,)

    def _update(
        self, p: np.ndarray, g: np.ndarray, slots: list[np.ndarray], rates: list, scratch: np.ndarray
    ) -> None:
        np.subtract(p, np.multiply(g, rates[0], out=scratch), out=p)


class Adam(Optimizer):
    """Adam with bias-corrected moments and L2 (not decoupled) decay.

    With m and v the moving averages of the gradient and its square after t steps,
    ``param -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)``.

    Parameters
    ----------
    lr : float
        Learning rate.
    beta1, beta2 : float
        Decay rates of the averages, in [0, 1).
    eps : float
        Added to the denominator.

    References
    ----------
    Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015, algorithm 1.
    """

    kind = "adam"
    slots = ("m", "v")

    def __init__(self, lr: float, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        super().__init__(lr)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {beta}")
        self.beta1, self.beta2, self.eps = float(beta1), float(beta2), _check_number("eps", eps, zero=False)

    def _rates(self, step_number: int) -> tuple[float, ...]:
        step_size = self.lr / (1.0 - self.beta1**step_number)
        correction = 1.0 / math.sqrt(1.0 - self.beta2**step_number)
        return (self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, correction, self.eps, step_size)

    def _update(
        self, p: np.ndarray, g: np.ndarray, slots: list[np.ndarray], rates: list, scratch: np.ndarray
    ) -> None:
        m, v = slots
        beta1, rest1, beta2, rest2, correction, eps, step_size = rates
        np.multiply(m, beta1, out=m)
        np.add(m, np.multiply(g, rest1, out=scratch), out=m)
        np.multiply(np.multiply(g, g, out=scratch), rest2, out=scratch)
        np.add(np.multiply(v, beta2, out=v), scratch, out=v)
        np.multiply(np.sqrt(v, out=scratch), correction, out=scratch)
        np.divide(m, np.add(scratch, eps, out=scratch), out=scratch)
        np.subtract(p, np.multiply(scratch, step_size, out=scratch), out=p)


_KINDS: dict[str, type[Optimizer]] = {cls.kind: cls for cls in (Adam, Sgd)}


def make_optimizer(kind: str, lr: float, **options: float) -> Optimizer:
    """Return the optimizer of that name.

    Parameters
    ----------
    kind : {'adam', 'sgd'}
    lr : float
        Learning rate, > 0.
    **options : float
        Further hyper-parameters of that kind (adam: `beta1`, `beta2`, `eps`).

    Returns
    -------
    Optimizer

    Raises
    ------
    ValueError
        An unknown kind, or a hyper-parameter out of range.
    TypeError
        A hyper-parameter the kind does not have.
    """
    if kind not in _KINDS:
        raise ValueError(f"optimizer must be one of {', '.join(sorted(_KINDS))}, got {kind!r}")
    return _KINDS[kind](lr, **options)


def _check_alike(arrays: dict[str, np.ndarray]) -> None:
    """Refuse arrays that differ from the first one or cannot be viewed as one flat vector."""
    param = next(iter(arrays.values()))
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
        if array.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise TypeError(f"{name} must be float32 or float64, got {array.dtype}")
        if array.dtype != param.dtype:
            raise TypeError(f"{name} must be {param.dtype} like param, got {array.dtype}")
        if array.shape != param.shape:
            raise ValueError(f"{name} must have the shape {param.shape} of param, got {array.shape}")
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name} must be C-contiguous, got strides {array.strides} for shape {array.shape}"
            )
