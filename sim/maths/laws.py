"""Laws of random times: how long until a failure, how long a repair takes."""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class Constant:
    """Always the same time, which may be 0: a cost, and no law of failures."""

    mean: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 0):
            raise SimError(f"could not make a constant: it is {self.mean}; it must be 0 or more")

    def survival(self, time: float) -> float:
        return 1.0 if time < self.mean else 0.0

    def sample(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
        return np.full(shape, self.mean)


@dataclass(frozen=True)
class Quantiles:
    """Times as measured: `times[i]` is the quantile `shares[i]`, straight lines between them."""

    shares: tuple[float, ...]
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.shares))
        if len(self.shares) < 2 or not rising or self.shares[0] != 0 or self.shares[-1] != 1:
            raise SimError(
                "could not make a law of quantiles: shares must rise from 0 to 1; give the least and the most"
            )
        rising = all(a <= b for a, b in itertools.pairwise((0, *self.times)))
        if len(self.times) != len(self.shares) or not rising or not self.times[-1] < math.inf:
            raise SimError("could not make a law of quantiles: give one time of 0 or more a share, in order")

    @property
    def mean(self) -> float:
        """Of the law that straight lines make."""
        weighed = zip(itertools.pairwise(self.shares), itertools.pairwise(self.times), strict=True)
        return math.fsum((high - low) * (first + last) / 2 for (low, high), (first, last) in weighed)

    def survival(self, time: float) -> float:
        if time < self.times[0]:
            return 1.0
        # From the right, so that a jump (equal times) counts whole.
        for i in range(len(self.times) - 1, 0, -1):
            if time >= self.times[i]:
                return 1 - self.shares[i]
            if time >= self.times[i - 1]:
                part = (time - self.times[i - 1]) / (self.times[i] - self.times[i - 1])
                return 1 - (self.shares[i - 1] + part * (self.shares[i] - self.shares[i - 1]))
        return 0.0

    def sample(self, rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
        return np.interp(rng.random(shape), self.shares, self.times)
