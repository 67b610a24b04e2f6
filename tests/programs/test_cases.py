"""Each of `cases`: what is said names the ranks to blame and the lines of code, and jobs end."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.programs.cases import CASES, DISAGREEMENTS
from tests.programs.running import catch_each, check, check_output, run_case

pytestmark = pytest.mark.launches

SIDE_BY_SIDE = 2


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return what becomes of each case that is asked for, by name; several run at a time."""
    folder = tmp_path_factory.mktemp("cases")
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ())
    ]
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    yield {
        case.name: pool.submit(run_case, case, folder / str(number))
        for number, case in enumerate(asked)
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.quick(
    "an exception",
    "a rank ends early",
    "killed",
    "stopped",
    "late",
    "out of memory",
    "a setting that kills",
    "bad arguments on one rank",
    "different numbers of batches",
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(outcomes, case):
    check(case, outcomes[case.name].result())


@pytest.fixture(scope="module")
def caught(tmp_path_factory):
    """Return what four ranks catch of each disagreement, by name, in one job."""
    folder = tmp_path_factory.mktemp("disagreements")
    caught = catch_each(DISAGREEMENTS, folder, 4)
    assert not list(folder.rglob("*.h5")), "one rank alone has written a file"
    return caught


@pytest.mark.quick
@pytest.mark.parametrize("case", DISAGREEMENTS, ids=str)
def test_a_disagreement_is_reported_on_every_rank_which_can_continue(caught, case):
    assert len(set(caught[case.name])) == 1
    check_output(case, caught[case.name][0])


@pytest.mark.parametrize("cases", [CASES, DISAGREEMENTS])
def test_the_names_of_cases_are_different(cases):
    assert len({case.name for case in cases}) == len(cases) >= 20
