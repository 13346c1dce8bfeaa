"""PyTorch: where a rank dies or stalls, the others end in time with an error that names it."""

import json
import re

import pytest
from support import launch
from support.launch import patient

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def rounds():
    """Rounds with a rank killed before a collective or inside it, one stopped, and two killed while saving."""
    environment = launch.variables("torch", OMP_NUM_THREADS="1")
    (printed,) = launch.workers("rank_deaths.py", [environment], 4, 2, 2, timeout=200, start=launch.fork_with("torch"))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def ends(rounds, how):
    """The case, surviving rank and its end, for all rounds of a kind."""
    return [(r["case"], int(rank), end) for r in rounds if r["case"]["how"] == how for rank, end in r["ends"].items()]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_others_end_in_time_and_name_the_rank(rounds, how):
    found = ends(rounds, how)
    assert found
    for case, rank, end in found:
        assert not end["hangs"], (case, rank)
        assert end["class"] == "RuntimeError"
        # 2 s on a quiet machine, which is what the long run is for.
        assert end["seconds"] < case["timeout"] + patient(6), (case, rank, end)
        named = re.search(r"no answer from ranks? ([\d, ]+)", end["message"])
        assert named and case["victim"] in map(int, re.findall(r"\d+", named[1])), (case, rank, end)


def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(rounds):
    found = [r for r in rounds if r["case"]["place"] == "saving"]
    assert {r["case"]["size"] for r in found} == {2, 4}
    for each in found:
        case = each["case"]
        # The save in which the rank died is complete if all its files were; every save before it was waited for.
        number = -(-case["file"] // case["files_per_save"])
        assert each["checkpoint"] in (number - 1, number), each
