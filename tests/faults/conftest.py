"""A table of what was done, shown after the tests, also of those that passed."""

import os

import pytest

from tests.support.faulty import SHORT, complete, kill_all, zero

LINES = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def no_run_lives_on():
    """Ends what a failing test has left."""
    yield
    kill_all()


@pytest.fixture
def table(request):
    """Takes one line for the table."""
    return request.config.stash.setdefault(LINES, []).append


@pytest.fixture
def count():
    """count("KILLS", 200): the number that the environment variable FAULTS_KILLS gives, else 200."""
    return lambda name, usual: int(os.environ.get(f"FAULTS_{name}", usual))


def pytest_terminal_summary(terminalreporter, config):
    if lines := config.stash.get(LINES, []):
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a run of 40 steps on 2 ranks at stage 2 that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    complete(folder / "run", folder / "log", zero(2), *SHORT)
    return folder / "run"
