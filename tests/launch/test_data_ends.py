"""Data that cannot be read any more end a run between two steps, saved; restored, it goes on as if nothing had been."""

import shutil

import pytest

from dstrain.checkpoint.store import Store
from tests.support.pictures import break_file, folder
from tests.support.runs import files, finish, metrics, train

pytestmark = pytest.mark.slow


def test_a_file_that_breaks_in_the_middle(tmp_path):
    """Oracle: the run that was never disturbed. The file breaks where one rank alone meets it, long after the start;
    none may be bad. Both ranks save the step before and end with code 2; with the file again the runs are equal.
    """
    data = folder(tmp_path / "data", 4, 6)
    words = [
        f"data.path={data}",
        "data.max_bad_fraction=0",
        "model.num_classes=4",
        "steps=9",
        "every.save=0",
        "every.report=1",
        "every.sample=0",
    ]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    output = finish(train(whole, 2, *words))
    assert f"data: {data}: 24 images, 4 classes of 6, no captions" in output and "held out: nothing" in output
    from dstrain.data.order import Order
    from dstrain.data.sources.images import open_images

    last = open_images(data, 32).name_sample(
        int(Order(24, 0).find_sample_index(22))
    )  # the third step; of the second rank
    shutil.copyfile(data / last, tmp_path / "kept.png")
    size = (data / last).stat().st_size
    break_file(data / last, "empty")
    (data / last).write_bytes(bytes(size))  # the same size: no other data
    output = finish(train(broken, 2, *words), code=2)
    assert "Traceback" not in output and last in output and "data.max_bad_fraction" in output
    assert "stopped at step 2, which is saved" in (broken / "log.txt").read_text()
    assert Store(broken / "checkpoints").list_steps() == [2] and (broken / "bad_files.txt").read_text().startswith(last)
    shutil.copyfile(tmp_path / "kept.png", data / last)
    assert "1 unreadable files are listed" in finish(train(broken, 2, *words))
    assert files(broken, 9) == files(whole, 9) and metrics(broken) == metrics(whole)
