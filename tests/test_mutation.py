"""Whether the mistakes of tests/mutation.py can still be made."""

import pytest

from tests.mutation import MISTAKES, ROOT, mutants_of, own_mutant, read_excused


@pytest.mark.parametrize("what, path, old, new, test", MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_mistake_has_its_place(what, path, old, new, test):
    """Oracle: the file, which holds the words once, and the test that is named; `python -m tests.mutation --mistakes`
    runs them.
    """
    assert own_mutant(path, old, new).line
    file, _, name = test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_excused_mutants_can_be_made():
    """Oracle: the mutants of the files: an excuse for none, as after a function was renamed, would excuse nothing."""
    excused = read_excused()
    made = {(path, mutant.change) for path in {path for path, _ in excused} for mutant in mutants_of(path)}
    assert len(excused) > 80 and excused <= made, sorted(excused - made)
