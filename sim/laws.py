"""Laws of random times: how long until a failure, how long a repair takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimError

Shape = int | tuple[int, ...]


class Law(Protocol):
    """A law of times above 0, in any unit; `mean` is in the same one."""

    @property
    def mean(self) -> float: ...

    def survival(self, time: float) -> float:
        """The chance of a time longer than `time`."""
        ...

    def sample(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
        """Independent times."""
        ...


def _check(law: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise SimError(f"could not make a {law} law: {name} is {value}; it must be above 0")


@dataclass(frozen=True)
class Exponential:
    """Times without memory."""

    mean: float

    def __post_init__(self) -> None:
        _check("exponential", mean=self.mean)

    def survival(self, time: float) -> float:
        return math.exp(-time / self.mean)

    def sample(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
        return rng.exponential(self.mean, shape)


@dataclass(frozen=True)
class Weibull:
    """Times with a hazard that falls (shape below 1) or rises (above 1) with age."""

    shape: float
    mean: float

    def __post_init__(self) -> None:
        _check("Weibull", shape=self.shape, mean=self.mean)

    @property
    def scale(self) -> float:
        return self.mean / math.gamma(1 + 1 / self.shape)

    def survival(self, time: float) -> float:
        return math.exp(-((time / self.scale) ** self.shape))

    def sample(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
        return self.scale * rng.weibull(self.shape, shape)


@dataclass(frozen=True)
class Lognormal:
    """Times whose logarithm is normal with the standard deviation `sigma`."""

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        _check("lognormal", mean=self.mean, sigma=self.sigma)

    @property
    def _mu(self) -> float:
        return math.log(self.mean) - self.sigma**2 / 2

    def survival(self, time: float) -> float:
        if time <= 0:
            return 1.0
        return math.erfc((math.log(time) - self._mu) / (self.sigma * math.sqrt(2))) / 2

    def sample(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
        return rng.lognormal(self._mu, self.sigma, shape)


@dataclass(frozen=True)
class Fixed:
    """Always the same time."""

    mean: float

    def __post_init__(self) -> None:
        _check("fixed", mean=self.mean)

    def survival(self, time: float) -> float:
        return 1.0 if time < self.mean else 0.0

    def sample(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
        return np.full(shape, self.mean)
