"""Who owns what in worlds of up to 4,096 ranks."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain import recipe
from dstrain.engine.masters import cut_into_shares
from tests.support.engines import resolve
from tests.support.tiny import Tiny


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=12), st.integers(1, 4096), st.booleans(), st.data())
@settings(max_examples=200, deadline=None)
def test_shares_cover_each_weight_once(sizes, world, together, data):
    """Oracle: by hand: laid out element by element, rank r has elements r * share to (r + 1) * share of all weights
    together, as at stages 1 and 2, or of each, as at stage 3. One rank alone finds what it has of the whole.
    """
    rank = data.draw(st.integers(0, world - 1))
    for line in [sizes] if together else [[size] for size in sizes if size]:
        share = max(1, -(-sum(line) // world))
        pieces = list(cut_into_shares(line, share, range(world)))
        begins = [sum(line[:index]) for index in range(len(line))]
        ends = 0
        for index, owner, start, numel, offset in sorted(pieces, key=lambda piece: (piece[0], piece[2])):
            assert numel > 0 and begins[index] + start == ends == owner * share + offset and offset + numel <= share
            ends += numel
            assert start + numel <= line[index]
        assert ends == sum(line)
        own = [piece for piece in pieces if piece[1] == rank]
        assert list(cut_into_shares(line, share, range(rank, rank + 1))) == own


def compare(out: Path) -> None:
    """What Masters says of all ranks, beside what DeepSpeed has put where on this one."""
    from dstrain.distributed import group
    from tests.engine.check_engines import decays
    from tests.support.engines import engines_for

    figures = {}
    for stage in (1, 2, 3):
        run = recipe.Run.model_validate({"batch": {"global": group.world()}})
        config = resolve({"zero_optimization": {"stage": stage}}, run, group.world(), "cpu")
        engines = engines_for(lambda: {"tiny": Tiny()}, run, config, decays)
        masters = engines.masters["tiny"]
        said = group.gather_objects(masters.fragments)
        figures[stage] = masters._layouts() == dict(enumerate(said))
        if stage < 3:
            mapped = [
                (weight._hp_mapping.lp_fragment_address, weight._hp_mapping.hp_fragment_address)
                for weights in masters._zero.bit16_groups
                for weight in weights
                if weight._hp_mapping is not None
            ]
            own = [(fragment.start, fragment.numel, offset) for fragment, _, offset in masters.fragments]
            figures[stage] &= own == [(inside.start, inside.numel, place.start) for inside, place in mapped]
    if group.rank() == 0:
        out.write_text(json.dumps(figures))


@pytest.mark.parametrize("world", [2, 3])
def test_layouts_are_those_of_the_ranks(on_ranks, tmp_path, world):
    """Oracle: DeepSpeed's own mapping of each weight at stages 1 and 2, and what each real rank says of itself."""
    on_ranks(world, compare, tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == {"1": True, "2": True, "3": True}
