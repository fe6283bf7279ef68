"""Data at an address: a web server with ranges, one that fails, the cache on a disk, and what the errors say."""

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dstrain.data.batches import Batches
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files import storage
from dstrain.data.files.cache import DiskCache
from dstrain.data.files.remote import open_files
from dstrain.data.formats.base import Request
from dstrain.data.open import open_sources
from dstrain.data.sources.images import open_images
from dstrain.recipe import Cache, ConfigError, Data, NotRead
from tests.data.formats.test_hugging_face import as_parquet, same, saved, table
from tests.support.launch import ROOT, environment
from tests.support.pictures import folder
from tests.support.ranges import serving

pytest.importorskip("aiohttp", reason="fsspec reads http through it")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("plain"), classes=3, each=7)


@pytest.fixture
def cache(tmp_path):
    return Cache(folder=str(tmp_path / "cache"), gb=0.1)


@pytest.fixture
def web(tmp_path):
    (tmp_path / "web").mkdir()
    with serving(tmp_path / "web") as server:
        yield server


@pytest.fixture
def waits(monkeypatch):
    """The seconds that the test's thread was to wait for a store. Neither it nor a thread that it starts waits."""
    seconds: list[float] = []
    test, earlier, sleep = threading.current_thread(), set(threading.enumerate()), time.sleep

    def note(pause: float) -> None:
        if threading.current_thread() is test:
            seconds.append(pause)
        elif threading.current_thread() in earlier:  # threads of earlier tests sleep on
            sleep(pause)

    monkeypatch.setattr(storage.time, "sleep", note)
    return seconds


def content_of(web, name: str, size: int = 9_000_000) -> bytes:
    content = np.random.default_rng(len(name)).bytes(size)
    (web.folder / name).parent.mkdir(exist_ok=True)
    (web.folder / name).write_bytes(content)
    return content


def entries(cache: Cache) -> list[Path]:
    return [path for path in Path(cache.folder, "dstrain-cache").iterdir() if len(path.name) == 32]


def test_every_form_of_an_address(web, cache):
    """Oracle: the files on the server's disk: names, sizes and bytes, by span, stream and whole file."""
    content = {name: content_of(web, name) for name in ("a-00.tar", "a-01.tar")}
    content["sub/b.tar"] = content_of(web, "sub/b.tar", 10)
    both = [("a-00.tar", False), ("a-01.tar", False)]
    forms = {
        f"{web.address}": [*both, ("sub", True)],
        f"{web.address}/": [*both, ("sub", True)],
        f"{web.address}/a-{{00..01}}.tar": both,
        f"{web.address}/a-00.tar?signed=1": both[:1],
        f"{web.address}/a-00.tar {web.address}/sub/b.tar": [both[0], ("sub", True)],
    }
    for form, names in forms.items():
        files = pickle.loads(pickle.dumps(open_files(form, cache)))
        assert files.list_names() == names
        for name in ("a-00.tar", "sub/b.tar") if ("sub", True) in names else ("a-00.tar",):
            whole = content[name]
            assert files.read_stat(name).size == len(whole)
            for start, stop in ((0, 5), (4_194_297, 4_194_313), (5, len(whole)), (len(whole) - 3, len(whole))):
                if stop <= len(whole):
                    assert files.read_span(name, start, stop - start) == whole[start:stop]
            with files.open(name) as file:
                assert file.seek(-5, os.SEEK_END) == len(whole) - 5 and file.read() == whole[-5:]
                assert file.seek(2) == 2 and file.read(3) == whole[2:5] and file.read() == whole[5:]
            assert files.fetch_local_path(name).read_bytes() == whole
            with pytest.raises(ConfigError, match=f"{name} ends after {len(whole)} bytes"):
                files.read_span(name, len(whole) - 1, 2)
        assert files.list_names("sub") == ([("b.tar", False)] if ("sub", True) in names else [])[:1] or "{" in form
    asked = len(web.asked)
    assert open_files(f"{web.address}/", cache).read_span("a-01.tar", 0, 9_000_000) == content["a-01.tar"]
    assert (
        open_files(f"{web.address}/", cache).read_span("a-01.tar", 8_000_000, 9)
        == content["a-01.tar"][8_000_000:8_000_009]
    )
    assert len(web.asked) == asked + 1  # the file, once
    newer = open_files(f"{web.address}/", cache).read_stat("").version
    content_of(web, "a-02.tar", 10)
    assert open_files(f"{web.address}/", cache).read_stat("").version != newer
    content["a-00.tar"] = content_of(web, "a-00.tar", 9_000_001)  # another version, of other bytes
    assert open_files(f"{web.address}/", cache).read_span("a-00.tar", 1, 9) == content["a-00.tar"][1:10]


@pytest.mark.parametrize("fault", ["503", "drop", "cut", "slow"])
def test_a_store_that_fails_is_asked_again_and_then_ends_the_run(web, cache, waits, fault):
    """Oracle: the bytes on the server's disk; after five tries over 31 s NotRead, which is no bad sample."""
    content = content_of(web, "a.tar", 1000)
    web.fault, web.broken = fault, 2
    assert open_files(web.address, cache).read_span("a.tar", 10, 20) == content[10:30]
    content = content_of(web, "a.tar", 2000)
    if fault != "slow":
        assert waits in ([0.2, 1.0], [0.2])  # aiohttp itself repeats what a server has not begun to answer
        files = open_files(web.address, cache)
        files.read_stat("a.tar")
        web.broken, waits[:] = 1000, []
        with pytest.raises(NotRead, match=r"a.tar cannot be read: the store does not answer.* in 5 tries"):
            files.read_span("a.tar", 10, 20)
        with pytest.raises(NotRead, match="no file is at fault"):
            files.fetch_local_path("a.tar")
        assert waits == pytest.approx([0.2, 1.0, 5.0, 25.0] * 2)
    web.broken = 0
    assert open_files(web.address, cache).read_span("a.tar", 10, 20) == content[10:30]


def test_a_server_without_ranges(web, cache):
    """Oracle: the bytes on the server's disk, of a whole file that is fetched once."""
    content, web.ranges = content_of(web, "a.tar"), False
    files = open_files(web.address, cache)
    for start in (4_194_309, 3, 8_000_000):
        assert files.read_span("a.tar", start, 100) == content[start : start + 100]
    assert web.bytes_sent == len(content)
    content_of(web, "b.tar")
    files = open_files(f"{web.address}/", cache.model_copy(update={"gb": 0.01}))
    files.list_names()
    with pytest.raises(NotRead, match=r"b.tar: the server sends whole files alone.* raise data.cache.gb"):
        files.read_span("b.tar", 3, 100)


def test_a_file_beyond_the_cache(web, cache):
    """Oracle: the bytes on the server's disk: a sample is fetched alone; the file as a whole is refused by name."""
    content = content_of(web, "big.tar", 11_000_000)
    files = open_files(web.address, cache.model_copy(update={"gb": 0.01}))
    for start, size in ((5, 100), (10_000_000, 7), (10_000_000, 7), (3, 0)):
        assert files.read_span("big.tar", start, size) == content[start : start + size]
    assert web.bytes_sent == 107
    with pytest.raises(ConfigError, match=r"/big.tar: a file of 0.011 GB does not fit .* write data.cache.gb=1,"):
        files.open("big.tar")


def test_what_is_wrong_at_the_start_is_one_line(web, cache, waits, monkeypatch):
    """Oracle: the table of errors of an address: wrong, refused, no server, no library; before anything is read."""
    content_of(web, "secret.parquet", 10)
    reached = {
        f"{web.address}/none/": "the store has no such object, folder or bucket",
        f"{web.address}/none.parquet": "none.parquet: the store has no such object",
        f"{web.address}/none.tar": "^http.*none.tar: the store has no such object",
        f"{web.address}/none.zip": "^http.*none.zip: the store has no such object",
        f"{web.address}/secret.parquet": "the store refuses it .*403.*give credentials .* by user:password@",
        "s3://bucket/x.parquet": "pip install 'dstrain\\[remote\\]'",
        "gs://bucket/x.tar": "^gs:// needs a library that is not installed.*pip install 'dstrain\\[remote\\]'",
        f"{web.address}/x{{3..1}}.parquet": "stands for none or for more than",
    }
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for address, message in reached.items():
        with pytest.raises(ConfigError, match=message) as error:
            open_images(address, 16, request=Request(SUFFIXES, cache=cache))
        assert "\n" not in str(error.value)
    with pytest.raises(NotRead, match="127.0.0.1:9/x.parquet cannot be read: the store does not answer"):
        open_images("http://127.0.0.1:9/x.parquet", 16, request=Request(SUFFIXES, cache=cache))
    assert waits == pytest.approx([0.2, 1.0])  # no longer: the address is as likely to be at fault
    (Path(cache.folder) / "x").write_text("a file")
    with pytest.raises(ConfigError, match="data.cache.folder=.*cannot be written"):
        open_files(web.address, Cache(folder=f"{cache.folder}/x"))


@pytest.mark.parametrize("gb", [0.1, 0.01])
def test_samples_equal_to_the_plain_folder(web, tmp_path, plain, gb):
    """Oracle: the plain folder: order, labels, classes and pixels; of a cache larger and smaller than the data."""
    cache = Cache(folder=str(tmp_path / "cache"), gb=gb)
    request = Request(SUFFIXES, cache=cache)
    as_parquet()(web.folder / "p", table(plain))
    as_parquet(compression="snappy")(web.folder / "c", table(plain))
    saved(web.folder / "s", table(plain))
    ballast = web.folder / "p" / "train-00002-of-00002.parquet.old"
    ballast.write_bytes(bytes(9_000_000))
    for address in ("p", "p/train-*.parquet", "p/train-{00000..00001}-of-00002.parquet", "c", "s"):
        same(open_images(f"{web.address}/{address}", 16, request=request), plain)
    train, unseen = open_sources(Data(path=f"{web.address}/p", image_size=16, cache=cache))
    same(train, plain)
    assert len(unseen) == 2
    if gb == 0.01:  # more is known of the server than fits
        source = open_images(f"{web.address}/p", 16, request=request)
        source.layout.files.read_stat(ballast.name)
        same(source, plain)
        assert min(path.stat().st_size for path in entries(cache)) < 10_000  # samples, and no blocks


def test_containers_at_an_address(web, cache, plain):
    """Oracle: the plain folder: tar shards by a pattern, and a zip file, read by ranges."""
    paths = sorted(plain.rglob("*.png"))
    for number in range(2):
        with tarfile.open(web.folder / f"shard-{number}.tar", "w") as shard:
            for place, path in enumerate(paths[11 * number : 11 * number + 11], 11 * number):
                shard.add(path, f"{place:03}.png")
                label = tarfile.TarInfo(f"{place:03}.cls")
                label.size = 2
                shard.addfile(label, io.BytesIO(path.parent.name.encode()))
    with zipfile.ZipFile(web.folder / "all.zip", "w") as archive:
        for path in paths:
            archive.write(path, path.relative_to(plain).as_posix())
    request = Request(SUFFIXES, cache=cache)
    for address in ("shard-{0..1}.tar", "all.zip"):
        same(open_images(f"{web.address}/{address}", 16, request=request), plain)


def test_batches_by_workers_are_read_ahead(web, cache, plain):
    """Oracle: batches of the plain folder, without workers and with one; a store that fails ends them as NotRead."""
    as_parquet()(web.folder / "p", table(plain))
    source = open_images(f"{web.address}/p", 16, request=Request(SUFFIXES, cache=cache))
    common = {"global_batch": 6, "micro_batch": 3, "seed": 1, "steps": 4}
    with Batches(open_images(plain, 16), **common) as expected:
        batches = [batch for step in range(4) for batch in expected.read_step(step)]
    for workers in (0, 1):
        with Batches(source, num_workers=workers, **common) as own:
            for batch, other in zip((batch for step in range(4) for batch in own.read_step(step)), batches):
                assert all(torch.equal(batch[name], other[name]) for name in other)
    assert source.prefetches
    fresh = open_files(f"{web.address}/p", cache.model_copy(update={"folder": f"{cache.folder}-2"}))
    source.layout.files = fresh
    source.prefetch(torch.arange(21))
    deadline = time.monotonic() + 60
    while len(entries(Cache(folder=f"{cache.folder}-2"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(entries(Cache(folder=f"{cache.folder}-2"))) == 2  # both files, though nobody has read a sample


def test_a_store_that_fails_in_a_run_is_no_bad_file(web, tmp_path, waits, plain):
    """Oracle: BadFiles' list, which stays empty, and `problem`, by which the training loop saves and ends."""
    as_parquet()(web.folder / "p", table(plain))
    cache = Cache(folder=str(tmp_path / "cache"), gb=0.1)
    source = open_images(f"{web.address}/p", 16, request=Request(SUFFIXES, cache=cache))
    for path in entries(cache):
        path.unlink()
    web.broken = 10_000
    with (
        Batches(source, global_batch=4, micro_batch=4, seed=1, folder=tmp_path) as batches,
        pytest.raises(NotRead, match="the store does not answer"),
    ):
        next(batches.read_step(0))
    assert not (tmp_path / "bad_files.txt").exists() and 25.0 in waits


def put(cache: DiskCache, number: int, size: int) -> bytes:
    """Reads an entry, which is written where it is not there."""
    content = bytes([number]) * size
    with cache.open_or_create_entry(f"{number:032x}", size, lambda path: path.write_bytes(content), "an entry") as file:
        return file.read()


def fill(folder: str, seed: int) -> None:
    """Reads and writes entries of a cache of 1 MB, of 2 MB in all."""
    cache, draw = DiskCache(folder, 1_000_000), np.random.default_rng(seed)
    for number in draw.integers(0, 60, 400).tolist():
        assert put(cache, number, 20_000 + 300 * number) == bytes([number]) * (20_000 + 300 * number)


def cached(folder: Path) -> dict[tuple[str, int], int]:
    """The size of each file of a cache, by name and inode, while other processes make and remove some."""
    sizes = {}
    for entry in os.scandir(folder) if folder.exists() else ():
        if len(entry.name) >= 32:
            with contextlib.suppress(FileNotFoundError):
                sizes[entry.name, entry.inode()] = entry.stat().st_size
    return sizes


def test_the_cache_is_bounded_and_shared(tmp_path):
    """Oracle: the bytes of the folder, never above the limit, while three processes fill it; the ledger counts them."""
    processes = [
        multiprocessing.get_context("fork").Process(target=fill, args=(str(tmp_path), seed)) for seed in range(3)
    ]
    for process in processes:
        process.start()
    folder, most = tmp_path / "dstrain-cache", 0
    while any(process.is_alive() for process in processes):
        before, after = cached(folder), cached(folder)  # what is in both was there between them, all at once
        most = max(most, sum(size for key, size in before.items() if key in after))
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert most <= 1_000_000 + 3 * 40_000  # each process fills one more entry meanwhile
    used = sum(cached(folder).values())
    assert 500_000 < used <= int((folder / "ledger").read_bytes()) <= 1_000_000
    (folder / "ledger").write_text("damaged")
    fill(str(tmp_path), 9)
    assert sum(cached(folder).values()) <= 1_000_000


def test_the_oldest_go_first(tmp_path):
    """Oracle: the order in which entries were last used; files of the user beside the cache stay."""
    (tmp_path / "own.txt").write_text("x" * 5000)
    cache = DiskCache(tmp_path, 10_000)
    for number in range(10):
        put(cache, number, 1000)
        os.utime(cache.folder / f"{number:032x}", (number, number))
    put(cache, 1, 1000)
    put(cache, 10, 1000)
    there = [number for number in range(11) if cache.has_entry(f"{number:032x}")]
    assert there == [1, *range(3, 11)] and (tmp_path / "own.txt").exists()
    with pytest.raises(ConfigError, match="an entry: a file of .* does not fit into the cache.*data.cache.gb="):
        put(cache, 11, 20_000)
    (cache.folder / f"{5:032x}").write_bytes(b"cut off")
    assert put(cache, 5, 1000) == bytes([5]) * 1000


_FILLS = """
import sys
from dstrain.data.files.remote import open_files
from dstrain.recipe import Cache
files = open_files(sys.argv[1], Cache(folder=sys.argv[2], gb=0.1))
print("begins", flush=True)
while True:
    files.cache.folder.joinpath("ledger").unlink(missing_ok=True)
    for path in files.cache.folder.glob("*"):
        if len(path.name) == 32:
            path.unlink()
    files.read_span("a.tar", 0, 9_000_000)
    files.fetch_local_path("a.tar")
"""


def test_killed_in_the_middle_of_a_fill(web, cache):
    """Oracle: the bytes on the server's disk: after kill -9 at any moment another process reads
    them, and none waits.
    """
    content = content_of(web, "a.tar")
    for moment in (0.02, 0.05, 0.09, 0.13):
        process = subprocess.Popen(
            [sys.executable, "-c", _FILLS, web.address, cache.folder],
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"begins\n"
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        files = open_files(web.address, cache)
        assert files.read_span("a.tar", 0, 9_000_000) == content
        assert files.fetch_local_path("a.tar").read_bytes() == content
    for number in range(12):  # what the killed left counts, and goes in the end
        put(files.cache, number, 9_000_000)
    assert not list(files.cache.folder.glob("*.tmp"))
    assert sum(path.stat().st_size for path in files.cache.folder.iterdir() if len(path.name) >= 32) <= 100_000_000


def test_s3(tmp_path, cache, plain):
    """Oracle: the plain folder; moto's server stands for S3. Both packages together have 300 MB: not in CI."""
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[s3,server]' s3fs to test against S3's stand-in")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    own = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": endpoint}
    os.environ.update(own)
    try:
        store = s3fs.S3FileSystem()
        store.mkdir("bucket")
        root = as_parquet()(tmp_path / "p", table(plain))
        saved(tmp_path / "s", table(plain))
        for path in (*root.iterdir(), *(tmp_path / "s").iterdir()):
            store.put_file(str(path), f"bucket/deep/{path.parent.name}/{path.name}")
        request = Request(SUFFIXES, cache=cache)
        for address in ("p", "p/train-*.parquet", "p/train-{00000..00001}-of-00002.parquet", "s"):
            same(open_images(f"s3://bucket/deep/{address}", 16, request=request), plain)
        content = bytes(range(250)) * 44_000
        store.pipe_file("bucket/deep/big.tar", content)
        big = open_files("s3://bucket/deep/big.tar", cache.model_copy(update={"gb": 0.01}))
        assert (
            big.read_span("big.tar", 10_000_003, 500) == content[10_000_003:10_000_503]
        )  # alone: the file does not fit
        for address in ("s3://nothing/p", "s3://bucket/none/", "s3://bucket/none.parquet"):
            with pytest.raises(ConfigError, match="has no such object, folder or bucket|holds no"):
                open_images(address, 16, request=request)
    finally:
        server.stop()
        for name in own:
            del os.environ[name]
