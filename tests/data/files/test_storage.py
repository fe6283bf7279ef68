"""What is no file is never opened, and storage that fails is no bad file."""

import errno
import io
import os
import resource
import socket
import tarfile

import pytest

from dstrain.commands.exits import run_main_with_exit_code
from dstrain.data.cached.latents import is_codes_cache
from dstrain.data.files import storage
from dstrain.data.source import BadSample, convert_errors_to_bad_sample
from dstrain.data.sources.captioned import open_captioned_source
from dstrain.data.sources.images import open_images
from dstrain.data.sources.videos import open_videos
from dstrain.recipe import ConfigError, NotRead
from tests.data.sources.test_videos import CUT
from tests.data.sources.test_videos import folder as folder_of_clips
from tests.support.pictures import folder, picture


def test_what_is_no_file_is_not_opened(tmp_path):
    """Oracle: POSIX: opening a FIFO waits for a writer for ever. It is a bad file, as a socket and a device are."""
    root = folder(tmp_path / "d", 1, 2)
    os.mkfifo(root / "c0" / "a.png")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "c0" / "b.png"))
        os.symlink("/dev/zero", root / "c0" / "c.png")
        source = open_images(root, 16)
        reasons = {}
        for index in range(len(source)):
            try:
                source[index]
            except BadSample as bad:
                reasons[bad.path] = bad.reason
    assert reasons == {
        f"c0/{name}.png": f"it is a {kind}, and no file"
        for name, kind in (("a", "FIFO"), ("b", "socket"), ("c", "device"))
    }
    assert source.compute_full_fingerprint()  # a FIFO has a size
    clips = folder_of_clips(tmp_path / "v", texts=True)
    (clips / "v0.webp").unlink()
    (clips / "v1.txt").unlink()
    for name in ("v0.mp4", "v1.txt"):
        os.mkfifo(clips / name)
    (clips / "v0.txt").write_text("x")
    videos = open_videos(clips, CUT)
    assert videos.compute_fingerprint()
    for index in (0, 1):
        with pytest.raises(BadSample, match="is a FIFO"):
            videos.read(index)
    for name in ("index.json", "encoding.json", "shard_00000.safetensors"):
        os.mkfifo(root / name)
    assert not is_codes_cache(root) and len(open_images(root, 16)) == 5
    os.mkfifo(root / "dataset.json")  # labels may stand there
    with pytest.raises(ConfigError, match="dataset.json cannot be read .*FIFO"):
        open_images(root, 16)
    os.mkfifo(tmp_path / "captions.tsv")
    with pytest.raises(ConfigError, match="captions.tsv is no file"):
        open_videos(folder_of_clips(tmp_path / "w"), CUT, captions=tmp_path / "captions.tsv")


def test_too_many_open_files_are_no_bad_file(tmp_path, monkeypatch):
    """Oracle: the kernel: with no descriptor left, open gives EMFILE; it is tried four times over 6.2 s, then ends the
    run. With a descriptor again, or from the second try on, the sample is read.
    """
    source = open_images(folder(tmp_path / "d", 1, 3), 16)
    expected, waits = source[0]["image"], []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def restore():
        return resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    monkeypatch.setattr(storage.time, "sleep", waits.append)
    lowest = os.dup(0)  # the next that would be given out
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with pytest.raises(NotRead, match="c0/000.png cannot be read .*Too many open files.*not the file's"):
            source[0]
        assert waits == pytest.approx([0.2, 1.0, 5.0])
        with pytest.raises(NotRead, match="Too many open files"):  # and no other sample in its place
            source.read_first_readable()
        monkeypatch.setattr(storage.time, "sleep", lambda seconds: restore())
        assert (source[0]["image"] == expected).all()
    finally:
        restore()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "x"),
        OSError(errno.ESTALE, "x"),
        OSError(errno.ENOTCONN, "x"),
        TimeoutError(errno.ETIMEDOUT, "x"),
        OSError(errno.ENOSPC, "x"),
        MemoryError(),
    ],
)
def test_errors_of_the_storage(tmp_path, error):
    """Oracle: errno(3): none of these says anything about the file's content; others do."""
    path = tmp_path / "a"
    path.write_text("x")
    with pytest.raises(NotRead, match=f"{path} cannot be read"), convert_errors_to_bad_sample("a", path):
        raise error
    for other in (FileNotFoundError(errno.ENOENT, "x"), PermissionError(errno.EACCES, "x"), OSError("truncated")):
        with pytest.raises(BadSample), convert_errors_to_bad_sample("a", path):
            raise other


def test_ffmpegs_own_errors(tmp_path):
    """Oracle: the file, read once more: FFmpeg says EIO and ENOMEM of damaged files, too, and those are bad files."""
    import av

    path = tmp_path / "a.mp4"
    path.write_bytes(b"x")
    for kind, number in ((av.error.OSError, errno.EIO), (av.error.MemoryError, errno.ENOMEM)):
        with pytest.raises(BadSample), convert_errors_to_bad_sample("a.mp4", path):
            raise kind(number, "broken", str(path))
    path.unlink()
    with pytest.raises(NotRead), convert_errors_to_bad_sample("a.mp4", path):
        raise av.error.OSError(errno.EIO, "gone", str(path))


def test_the_command_ends_with_one_message(capsys):
    """Oracle: the table of exit codes: 1, for a supervisor that starts again; the reason, and no traceback."""

    def fail() -> None:
        raise NotRead("/data/a.png cannot be read (OSError: EIO)")

    with pytest.raises(SystemExit) as ended:
        run_main_with_exit_code(fail)
    err = capsys.readouterr().err
    assert ended.value.code == 1 and "error:\n  /data/a.png cannot be read" in err and "Traceback" not in err


def test_a_pair_in_a_tar_is_tried_again(tmp_path, monkeypatch):
    """Oracle: the pair as it was read before: a descriptor is free again at the second try."""
    picture(3).save(image := io.BytesIO(), "PNG")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in (("1.png", image.getvalue()), ("1.txt", b"a thing")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    source = open_captioned_source(tmp_path / "a.tar", 16)
    expected = source[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(storage.time, "sleep", lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        again = source[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all((again[name] == expected[name]).all() for name in expected)
