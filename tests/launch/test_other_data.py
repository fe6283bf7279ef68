"""A launch whose second rank reads other data ends at its start, and says which file differs."""

import shutil
import subprocess

import pytest

from tests.support.launch import ROOT, environment, free_port
from tests.support.pictures import folder, picture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("differs", [True, False])
def test_a_launch_with_other_data_on_rank_1(tmp_path, differs):
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
    port, ranks = str(free_port()), []
    for rank, view in enumerate(views):
        env = environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = ["python", str(ROOT / "launch" / "train.py"), *words]
        ranks.append(
            subprocess.Popen(command, cwd=view, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    if not differs:
        assert [rank.returncode for rank in ranks] == [0, 0], texts
        return
    assert all(rank.returncode for rank in ranks) and not (tmp_path / "run" / "checkpoints").exists(), texts
    assert any("sees c1/zz.png, which is not on rank 0" in text for text in texts), texts
