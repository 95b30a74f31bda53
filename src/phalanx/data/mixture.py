"""Mixture: which of several sets each sample of a run comes from, by arithmetic on its number alone.

With integer shares a_0 … a_(k-1) and A_j = a_j + … + a_(k-1), number n asks each set in turn. Of the numbers that come
to set j, counted from 0, the m-th is taken iff floor((m + 1) a_j / A_j) > floor(m a_j / A_j); so set j has got
floor(m a_j / A_j) of the first m, and the others go on to set j + 1 (the Beatty sequence of a_j / A_j). Every floor
loses less than one, so that of the first n samples, for every n, set j has got its share n a_j / A_0 to within less
than max(1, k - 1) samples: proportions are exact in the long run, and nearly so in each batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from phalanx.data.order import Integers


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in proportion to `weights`, each taken as the decimal that it is written as."""
    exact = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * common) for weight in exact]
    divisor = math.gcd(*integers)
    return tuple(integer // divisor for integer in integers)


def choose(first: int, count: int, shares: Sequence[int]) -> tuple[Integers, Integers]:
    """For samples `first` to `first + count` of the run: their sets, and how many samples each set has given before.
    Two int64 arrays [count]."""
    sets, earlier = np.zeros(count, dtype=np.int64), np.arange(first, first + count, dtype=np.int64)
    if len(shares) == 1:
        return sets, earlier
    for place, number in enumerate(range(first, first + count)):
        sets[place], earlier[place] = _one(number, shares)
    return sets, earlier


def _one(number: int, shares: Sequence[int]) -> tuple[int, int]:
    """Set and number within it. Python's integers: products may be larger than 2^63."""
    rest = sum(shares)
    for index, share in enumerate(shares):
        before = number * share // rest
        if (number + 1) * share // rest > before:
            return index, before
        number, rest = number - before, rest - share
    raise AssertionError("the last set takes all that comes to it")
