"""The modes of all files and folders that commands write, under several umasks."""

import os
import stat

import pytest

from dstrain.runs.weights import write_part_weights
from tests.launch.test_vae import train as train_vae
from tests.support.launch import here, launch

pytestmark = pytest.mark.slow


@pytest.fixture
def umask():
    """Sets the umask, which is put back."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def wrong_modes(folder, mask):
    """Files and folders that have not exactly the modes that the umask leaves."""
    paths = (folder, *folder.rglob("*"))
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}
    assert len(paths) > 3
    return {str(path): oct(mode) for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~mask}


def test_every_file_follows_the_umask(tmp_path, monkeypatch, capsys, umask):
    """Oracle: POSIX: 0666 & ~umask for files, 0777 & ~umask for folders, of training and of every
    command that writes.
    """
    vae, dit, steps = tmp_path / "vae", tmp_path / "dit", ["steps=2", "every.save=1", "every.sample=2"]
    umask(0o077)
    train_vae(tmp_path, "kl", vae, *steps, "every.evaluate=2", "save.best=true")
    assert wrong_modes(vae, 0o077) == {}
    umask(0o002)
    launch("launch/train.py", "--recipe", "tests/launch/tiny.yaml", f"folder={dit}", "--profile", "1:2", *steps, num=2)
    assert sorted(path.name for path in (dit / "profile").iterdir()) == [
        f"steps_1-2_rank_{rank}.json.gz" for rank in (0, 1)
    ]
    write_part_weights(dit / "checkpoints" / "step_00000002", ["denoiser"], None, dit / "model")
    assert wrong_modes(dit, 0o002) == {}
    diffusers, out = tmp_path / "diffusers", "--out"
    for mask, folder, script, *words in (
        (0o022, diffusers, "export.py", vae, out, diffusers),
        (0o002, tmp_path / "parts", "export.py", vae, out, tmp_path / "parts", "--format", "safetensors"),
        (0o002, tmp_path / "weights", "consolidate.py", vae, out, tmp_path / "weights", "--shard-size", "20KB"),
        (
            0o022,
            tmp_path / "imported",
            "import.py",
            diffusers,
            "--recipe",
            tmp_path / "recipe.yaml",
            out,
            tmp_path / "imported",
        ),
        (
            0o002,
            tmp_path / "codes",
            "encode.py",
            "--first-stage",
            diffusers,
            "--data",
            "builtin:fashion",
            "--image-size",
            "16",
            "--split",
            "held_out",
            out,
            tmp_path / "codes",
        ),
        (0o077, vae, "evaluate.py", vae, "--num-samples", "4"),
        (0o002, dit, "generate.py", dit, "--num-samples", "2", "--steps", "2"),
    ):
        umask(mask)
        code, out_text, err = here(script, words, monkeypatch, capsys)
        assert code == 0, err
        assert script not in ("encode.py", "evaluate.py") or "500 images, 10 classes of 50" in out_text + err
        assert wrong_modes(folder, mask) == {}
