"""The line search of one start: a step length for the weak Wolfe conditions."""

from __future__ import annotations

import math
from typing import Final

_ARMIJO: Final = 1e-4  # of the slope: a sufficient decrease
_CURVATURE: Final = 0.9  # of the slope: a step that is long enough

_End = tuple[float, float, float]  # t, loss and slope


class Bracket:
    """A step length between one that is too short and one that is too long.

    For the weak Wolfe conditions, the approximate ones within rounding of the loss; by the minimum
    of the cubic through both ends, and a secant of the slope while no end is too long.

    Args:
        loss, slope: At the start.
        speed: Radians in a unit of t.
        longest: Radians of the first trial, t = 1, at most.
        eps: Rounding of numbers around 1.

    Reference: Nocedal & Wright (2006), 3.5; Hager & Zhang (2005), section 2.
    """

    def __init__(self, loss: float, slope: float, speed: float, longest: float, eps: float) -> None:
        self._loss, self._slope, self._rounding = loss, slope, 10 * eps * abs(loss)
        self.t = min(1.0, longest / speed) if speed > 0 else 1.0
        self.is_done, self._is_accepted = False, False
        self._low, self._high = (0.0, loss, slope), (math.inf, loss, slope)

    def narrow(self, loss: float, slope: float, is_last: bool) -> None:
        """Judge loss and slope at t, and choose the next t."""
        t, start = self.t, self._slope
        falls = loss <= self._loss + _ARMIJO * t * start or (
            loss <= self._loss + self._rounding and slope <= (2 * _ARMIJO - 1) * start
        )
        before = self._low
        if not (math.isfinite(loss) and math.isfinite(slope) and falls):
            self._high = t, loss, slope
        elif slope < _CURVATURE * start:
            self._low = t, loss, slope
        else:
            self._is_accepted = True
        self.is_done = self._is_accepted or is_last
        if self.is_done:
            return
        if self._high[0] < math.inf:
            self.t = _minimum_of_cubic(self._low, self._high)
        else:
            self.t = _secant(before, self._low)
        self.is_done = self._high[0] - self._low[0] <= 1e-14 * self._high[0]

    def chosen(self) -> float:
        """Return t if it was accepted, else the longest with a sufficient decrease."""
        return self.t if self._is_accepted else self._low[0]


def _minimum_of_cubic(low: _End, high: _End) -> float:
    """Return where the cubic through both ends is least, not within a tenth of them."""
    (a, at_a, slope_a), (b, at_b, slope_b) = low, high
    width = b - a
    t = a + 0.5 * width
    if math.isfinite(at_b) and math.isfinite(slope_b):
        first = slope_a + slope_b - 3 * (at_b - at_a) / width
        second = math.sqrt(max(first * first - slope_a * slope_b, 0.0))
        below = slope_b - slope_a + 2 * second
        if below:
            t = b - width * (slope_b + second - first) / below
    return min(max(t, a + 0.1 * width), b - 0.1 * width)


def _secant(before: _End, low: _End) -> float:
    """Return where the slope would vanish, from 1.5 to 10 times the last step length."""
    fall = before[2] - low[2]
    t = low[0] + (low[0] - before[0]) * low[2] / fall if fall else 2 * low[0]
    return min(max(t, 1.5 * low[0]), 10 * low[0])
