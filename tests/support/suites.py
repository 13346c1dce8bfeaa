"""Which of many cases run by default; the others are marked `exhaustive`."""

import pytest


def some(cases, chosen, *backends):
    """The cases for `parametrize`, all but the `chosen` ones marked; on these backends only, where any are named.

    `chosen` is a collection of cases, a function of a case, or a number n: then each n-th is chosen.
    """
    cases = list(cases)
    if isinstance(chosen, int):
        kept = [number % chosen == 0 for number in range(len(cases))]
    else:
        kept = [chosen(case) if callable(chosen) else case in chosen for case in cases]
    assert any(kept) or not cases, f"none of {cases} is chosen"
    mark = pytest.mark.exhaustive(*backends)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if keep else [mark])
        for case, keep in zip(cases, kept)
    ]
