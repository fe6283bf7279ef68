"""Model cards: a recipe is published without the paths of the machine that trained it."""

from pathlib import Path

from dstrain import recipe
from dstrain.runs.card import _remove_local_paths

ROOT = Path(__file__).parents[2]


def test_no_path_of_this_machine_is_published():
    """Oracle: the text of the folder in which all files of the recipe lie, in sections, lists and behind KIND:, which
    the published recipe does not hold; its entries that are no absolute paths; and the file's own names, which stay.
    """
    secret = "/home/somebody/secret"
    words = [
        f"folder={secret}/runs/a",
        f"init_from={secret}/weights.safetensors",
        f"data.mixture=[{{path: {secret}/cats, weight: 1}}, {{path: hf://datasets/dogs, weight: 2}}]",
        f"data.cache.folder={secret}/cache",
        f"samples.features=[inception:{secret}/inception.pt]",
        f"samples.reference={secret}/statistics.npz",
        "samples.metrics=[fid]",
    ]
    run = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", words)
    hidden = _remove_local_paths(run)
    text = recipe.dump_run(hidden)
    assert secret in recipe.dump_run(run) and "somebody" not in text
    assert [source.path for source in hidden.data.mixture] == ["cats", "hf://datasets/dogs"]
    assert hidden.samples.features == ("inception:inception.pt",) and hidden.samples.reference == "statistics.npz"
    assert (hidden.data.cache.folder, hidden.folder, hidden.init_from) == ("cache", None, None)
    assert _remove_local_paths(recipe.load_recipe(None, ["track.notes='~10 % less'"])).track.notes == "~10 % less"
    assert hidden.model == run.model and hidden.optimizer == run.optimizer
