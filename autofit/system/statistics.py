"""The median of few values, and how far it can be trusted."""

from __future__ import annotations

import math

# Student's t, two-sided 95 %, by degrees of freedom; 1.96 beyond.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def median(values: tuple[float, ...] | list[float]) -> float:
    """The median; ``values`` must not be empty."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: tuple[float, ...] | list[float]) -> float:
    """Half-width of a 95 % interval of the median.

    The standard error of a normal sample's median is 1.2533 times that of its mean (asymptotically), scaled
    by Student's t for the small samples of a trial. The deviation is the robust one (1.4826 times the median
    absolute deviation), at least half of the usual one, so that a single straggler neither rules nor vanishes.
    One value alone says nothing of its spread: a quarter of it is returned.
    """
    count = len(values)
    if count < 2:
        return 0.25 * values[0]
    centre = median(values)
    mean = sum(values) / count
    usual = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    robust = 1.4826 * median([abs(value - centre) for value in values])
    t95 = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    return t95 * 1.2533 * max(robust, usual / 2) / math.sqrt(count)
