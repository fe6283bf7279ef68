"""A launch whose second rank reads other data ends at its start, and says which file differs."""

import shutil

import pytest

from tests.support.launch import command, free_port, start
from tests.support.pictures import folder, picture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("differs", [True, False])
def test_a_launch_with_other_data_on_rank_1(tmp_path, monkeypatch, differs):
    """Oracle: the file that differs: both ranks end with 2 and name it before a step; with equal copies they train."""
    views = tmp_path / "a", tmp_path / "b"
    folder(views[0] / "d", 2, 8)
    shutil.copytree(views[0] / "d", views[1] / "d")
    if differs:
        picture(9).save(views[1] / "d" / "c1" / "zz.png")
    words = [
        "--recipe",
        "dit-small.yaml",
        "--ds_config",
        "zero1.json",
        "data.path=d",
        "data.image_size=16",
        "model.num_classes=2",
    ]
    words += ["steps=2", "batch.global=4", "batch.micro=2", "every.sample=0", "every.evaluate=0", "model.depth=1"]
    words += [f"folder={tmp_path / 'run'}", "data.workers=0"]
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"], ranks = str(free_port()), []
    for rank, view in enumerate(views):
        monkeypatch.chdir(view)
        with open(tmp_path / f"output{rank}", "w") as log:
            ranks.append(start(command("launch/train.py", *words, num=1), log, RANK=str(rank), **shared))
    codes = [rank.wait(200) for rank in ranks]
    texts = [(tmp_path / f"output{rank}").read_text() for rank in (0, 1)]
    if not differs:
        assert codes == [0, 0], texts
        return
    assert all(codes) and not (tmp_path / "run" / "checkpoints").exists(), texts
    assert any("sees c1/zz.png, which is not on rank 0" in text for text in texts), texts
