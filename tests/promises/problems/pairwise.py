"""Rows of levels, one level per factor, in which every pair of levels of two factors comes together somewhere."""

from __future__ import annotations

import itertools
import random


def pairs_of(row):
    """The pairs of levels, as `((factor, level), (factor, level))`, that a row holds."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def is_forbidden(row, rules):
    """Whether a row, perhaps not complete, has for each factor of some rule one of the levels that the rule names."""
    return any(all(factor in row and row[factor] in levels for factor, levels in rule.items()) for rule in rules)


def possible_pairs(levels, rules):
    """All pairs that no rule forbids, by themselves or with the levels that factors with a single one always have."""
    always = {factor: only[0] for factor, only in levels.items() if len(only) == 1}
    singles = [[(factor, level) for level in levels[factor]] for factor in sorted(levels)]
    pairs = itertools.chain.from_iterable(itertools.product(a, b) for a, b in itertools.combinations(singles, 2))
    return {pair for pair in pairs if not is_forbidden({**always, **dict(pair)}, rules)}


def covering_rows(levels, rules=(), seed=0, num_candidates=4):
    """A few rows that hold all possible pairs and break no rule. Greedy: each takes the best of some candidates.

    Args:
        levels: dict from factor to a list of hashable levels.
        rules: dicts from factors to collections of levels; a row may not have one of the levels for each of them.
        seed: of the order in which candidates are filled.
        num_candidates: how many rows are tried for each one that is taken.

    Raises:
        ValueError: if a pair fits into no row, because of several rules together.
    """
    chance = random.Random(seed)
    missing = sorted(possible_pairs(levels, rules), key=repr)
    rows = []
    while missing:
        left = set(missing)
        candidates = [_filled(dict(chance.choice(missing)), levels, rules, left, chance) for _ in range(num_candidates)]
        candidates = [row for row in candidates if row is not None]
        if not candidates:
            raise ValueError(f"No row can hold {missing[0]}")
        best = max(candidates, key=lambda row: len(pairs_of(row) & left))
        rows.append(best)
        missing = [pair for pair in missing if pair not in pairs_of(best)]
    return rows


def _filled(row, levels, rules, missing, chance):
    factors = [factor for factor in levels if factor not in row]
    chance.shuffle(factors)
    for factor in factors:
        allowed = [level for level in levels[factor] if not is_forbidden({**row, factor: level}, rules)]
        if not allowed:
            return None
        chance.shuffle(allowed)

        def gain(level, factor=factor):
            new = (factor, level)
            return sum(tuple(sorted((new, old), key=lambda item: item[0])) in missing for old in row.items())

        row[factor] = max(allowed, key=gain)
    return row
