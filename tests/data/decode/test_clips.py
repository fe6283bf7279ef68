"""Decoding of videos: every frame, in RGB, in number, and windows that are slices of the whole."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.data.decode import clips, pixels
from dstrain.data.decode.clips import Cut, read_clip, read_frame_listing
from dstrain.data.decode.pixels import crop_center, to_tensor
from dstrain.recipe import ConfigError
from tests.support.clips import LOSSLESS, LOSSY, moving, write, write_pictures
from tests.support.pictures import picture

COUNT = 41


def as_clip(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def whole(path, count=COUNT, height=32, width=48, **options):
    """All frames, decoded from the start, and how many are real."""
    video, frames, _ = read_clip(path, Cut(count + 3, height, width, **options))
    return video, frames


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_videos_come_back(tmp_path, kind):
    """Oracle: the frames that were written, bit for bit, in number, the last one repeated behind them."""
    codec, pixels = LOSSLESS[kind]
    frames = moving(COUNT)
    video, real = whole(write(tmp_path / kind, frames, codec, pixels))
    assert real == COUNT and torch.equal(video[:COUNT], as_clip(frames))
    assert all(torch.equal(frame, video[COUNT - 1]) for frame in video[COUNT:])


@pytest.mark.parametrize(
    "suffix, options", [(".webp", {}), (".apng", {}), (".png", {}), (".gif", {}), (".apng", {"default_image": True})]
)
def test_animated_pictures_come_back(tmp_path, suffix, options):
    """Oracle: the frames that were written; 8 x 8 x 4 colours, which a GIF holds; a default image is no frame."""
    frames = moving(COUNT) // np.array([32, 32, 64], np.uint8) * np.array([32, 32, 64], np.uint8)
    shown = frames[1:] if options else frames
    video, real = whole(write_pictures(tmp_path / f"a{suffix}", frames, **options))
    assert real == len(shown) and torch.equal(video[:real], as_clip(shown))


@pytest.mark.parametrize("kind", LOSSY)
def test_lossy_videos_are_near(tmp_path, kind):
    """Oracle: the frames that were written, each the nearest to its own: none lost, none twice, none swapped."""
    codec, options = LOSSY[kind]
    frames = moving(COUNT, 96, 64)
    video, real = whole(write(tmp_path / kind, frames, codec, options=options), height=64, width=96)
    assert real == COUNT
    video, written = video[:COUNT].float(), as_clip(frames).float()
    distance = (video[:, None] - written[None]).abs().mean((2, 3, 4))  # (N, N)
    assert torch.equal(distance.argmin(1), torch.arange(COUNT))
    assert distance.diagonal().max() < 8


@pytest.mark.parametrize("kind", [*LOSSY, "ffv1.mkv", "png.mov"])
def test_a_window_is_a_slice_of_the_whole(tmp_path, kind, monkeypatch):
    """Oracle: decoding from the start; every start, several keyframes, B-frames, open groups; where it is said,
    decoding really began later."""
    codec, options = LOSSY.get(kind, (None, None))
    path = tmp_path / kind
    if codec is None:
        write(path, moving(COUNT, 96, 64), *LOSSLESS[kind], {"g": "12"})
    else:
        write(path, moving(COUNT, 96, 64), codec, options=options)
    full, _ = whole(path, height=32, width=48)
    begun = []
    frames = clips._decode_frames_from_keyframe
    monkeypatch.setattr(
        clips, "_decode_frames_from_keyframe", lambda *given: (begun.append(pair[0]) or pair for pair in frames(*given))
    )
    listing = read_frame_listing(path)
    assert listing.count == COUNT
    late = 0
    for start in range(COUNT - 8):
        begun.clear()
        video, real, again = read_clip(path, Cut(5, 32, 48, stride=2), (start + 0.5) / (COUNT - 8), listing)
        assert again is listing and real == 5
        assert torch.equal(video, full[start : start + 9 : 2]), start
        assert begun[-1] == start + 8  # no frame behind the window is decoded
        late += begun[0] > 0
        assert not late or start - begun[0] < 26  # at most two keyframes back
    seeks = kind not in ("vp8.webm", "mpeg4.avi", "refresh.mkv")
    assert (late > 8) == seeks, late


def test_keyframes_that_say_too_much(tmp_path):
    """Oracle: decoding from the start: wrong entries of a listing are noticed, not believed."""
    path = write(tmp_path / "a.mp4", moving(COUNT), *LOSSY["h264.mp4"][:1], options=LOSSY["h264.mp4"][1])
    full, _ = whole(path)
    listing = read_frame_listing(path)
    wrong = listing._replace(keyframes=tuple((place and place + 3, time + 7) for place, time in listing.keyframes))
    video, _, _ = read_clip(path, Cut(4, 32, 48), 0.999, wrong)
    assert torch.equal(video, full[COUNT - 4 : COUNT])


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.avi", "a.mov", "a.gif", "a.webp", "a.apng"])
def test_red_is_red(tmp_path, name):
    """Oracle: the first channel is red, whose level is 0 .. 255, in every format."""
    frames = np.zeros((4, 32, 32, 3), np.uint8)
    frames[..., 0] = 255
    if name.split(".")[1] in ("gif", "webp", "apng"):
        frames[1:, 0, 0, 1] = [1, 2, 3]  # equal frames would be merged
        path = write_pictures(tmp_path / name, frames)
    else:
        codec = {"a.webm": "libvpx-vp9", "a.avi": "mpeg4"}.get(name, "libx264")
        path = write(tmp_path / name, frames, codec)
    video, _ = whole(path, 1, 32, 32)
    assert video[0, 0, 8:, 8:].min() > 240 and video[0, 1:, 8:, 8:].max() < 12
    grey, _ = whole(path, 1, 32, 32, channels=1)
    assert grey.shape[1] == 1 and 70 < grey[0, 0, 16, 16] < 82  # 0.299 * 255


@pytest.mark.parametrize("name", ["a.webp", "a.apng", "a.mkv"])
def test_what_is_transparent_is_white(tmp_path, name):
    """Oracle: alpha compositing by hand: 0 shows white, 255 the colour, 51 a fifth of it."""
    frames = np.zeros((3, 32, 32, 4), np.uint8)
    frames[..., 0], frames[:, 16:, :, 3], frames[:, 16:, 16:, 3] = 255, 255, 51
    frames[:, 0, 0] = np.arange(3)[:, None] + 1
    path = tmp_path / name
    if name == "a.mkv":
        write(path, frames, "ffv1", "bgra")
    else:
        write_pictures(path, frames)
    video, real = whole(path, 3, 32, 32)
    assert real == 3
    for row, column, colour in ((8, 8, (255, 255, 255)), (24, 8, (255, 0, 0)), (24, 24, (255, 204, 204))):
        assert (video[0, :, row, column].int() - torch.tensor(colour)).abs().max() <= 1


@pytest.mark.parametrize("angle", [90, 180, 270])
def test_a_telephone_held_upright(tmp_path, angle):
    """Oracle: the frames turned by numpy, where the file says so."""
    import av

    path = tmp_path / "a.mov"
    frames = moving(3, 48, 32)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "rgb24"
        stream.set_display_rotation(angle)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    turned = np.stack([np.rot90(frame, angle // 90) for frame in frames])
    video, _ = whole(path, 3, *turned.shape[1:3])
    assert torch.equal(video[:3], as_clip(turned.copy()))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp"])
def test_a_picture_is_a_clip_of_one_frame(tmp_path, suffix):
    """Oracle: the picture, cropped as images are, in every frame, one of them real."""
    image = picture(3, 50, 40)
    options = {".jpg": {"quality": 100, "subsampling": 0}, ".webp": {"lossless": True}}.get(suffix, {})
    image.save(tmp_path / f"a{suffix}", **options)
    video, real, _ = read_clip(tmp_path / f"a{suffix}", Cut(5, 32, 32))
    expected = to_tensor(crop_center(image, 32))
    assert real == 1 and all(torch.equal(frame, video[0]) for frame in video)
    assert (video[0].int() - expected.int()).abs().max() <= (6 if suffix == ".jpg" else 0)


def test_a_still_cut_takes_the_first_frame_alone(tmp_path):
    """Oracle: the frames that were written."""
    frames = moving(5)
    video, real, _ = read_clip(write_pictures(tmp_path / "a.webp", frames), Cut(3, 32, 48, still=True), 0.9)
    assert real == 1 and torch.equal(video, as_clip(frames[[0, 0, 0]]))


@pytest.mark.parametrize("size", [(64, 96), (96, 64), (128, 32), (37, 53)])
@pytest.mark.parametrize("width, height", [(32, 32), (32, 16), (16, 32), (24, 20), (96, 20)])
def test_the_crop_of_a_rectangle(size, width, height):
    """Oracle: the definition, step by step: halve, resize to cover, cut out the middle."""
    image = picture(1, *size)
    expected = image
    while expected.width >= 2 * width and expected.height >= 2 * height:
        expected = expected.resize((expected.width // 2, expected.height // 2), Image.Resampling.BOX)
    scale = max(width / expected.width, height / expected.height)
    wide, high = round(expected.width * scale), round(expected.height * scale)
    expected = expected.resize((wide, high), Image.Resampling.BICUBIC)
    x, y = (expected.width - width) // 2, (expected.height - height) // 2
    expected = expected.crop((x, y, x + width, y + height))
    cropped = crop_center(image, width, height)
    assert cropped.size == (width, height) and np.array_equal(cropped, expected)


def test_windows():
    """Oracle: by hand: every start as often, the middle without chance, all there is of a short file."""
    cut = Cut(3, 8, 8, stride=2)
    assert [cut.choose_frame_window(8, chance / 8) for chance in range(8)] == [
        range(s, s + 5, 2) for s in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert [list(cut.choose_frame_window(count)) for count in (1, 2, 3, 4, 5, 7)] == [
        [0],
        [0],
        [0, 2],
        [0, 2],
        [0, 2, 4],
        [1, 3, 5],
    ]
    assert list(cut.choose_frame_window(8, 1 - 2**-24)) == [3, 5, 7]


@pytest.mark.parametrize(
    "fault, error",
    [
        ("empty", "Invalid|end of file|EOF"),
        ("text", "Invalid"),
        ("playlist", "Invalid|whitelist"),
        ("truncated", "ends after|Invalid|moov|frame"),
        ("sound only", "no video stream"),
        ("huge", "exceed the cap"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, fault, error, monkeypatch):
    """Oracle: the contract: an error that says why; a playlist never leads to another file."""
    path = write(tmp_path / "a.mp4", moving(COUNT), "libx264")
    sound = path.read_bytes()
    if fault == "sound only":
        import av

        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
    elif fault == "huge":
        monkeypatch.setattr(pixels, "PIXEL_CAP", 100)
    else:
        (tmp_path / "other.mp4").write_bytes(sound)
        path.write_bytes(
            {
                "empty": b"",
                "text": b"not a video\n" * 50,
                "truncated": sound[: len(sound) // 2],
                "playlist": b"ffconcat version 1.0\nfile other.mp4\n",
            }[fault]
        )
    with pytest.raises(Exception, match=error):
        read_clip(path, Cut(5, 32, 32))


def test_names_that_look_like_addresses(tmp_path, monkeypatch):
    """Oracle: the frames that were written, by a relative name with a colon and one with a format's directive."""
    monkeypatch.chdir(tmp_path)
    for name in ("a:b.avi", "http:x.avi", "a%03d.avi", "-i \u00e9 x.avi"):
        write(tmp_path / "made.avi", moving(3), *LOSSLESS["ffv1.avi"]).rename(tmp_path / name)
        video, real, _ = read_clip(Path(name), Cut(3, 32, 48))
        assert real == 3 and torch.equal(video, as_clip(moving(3)))


def test_a_file_whose_end_is_missing(tmp_path):
    """Oracle: the contract: an index that promises 41 frames where the data end early is an error, unless the window
    lies before."""
    path = write(tmp_path / "a.mp4", moving(COUNT), "libx264", options={"movflags": "+faststart", "bf": "0"})
    import av

    fast = tmp_path / "fast.mp4"
    with av.open(str(path)) as source, av.open(str(fast), "w", options={"movflags": "+faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    fast.write_bytes(fast.read_bytes()[: -fast.stat().st_size // 4])
    assert read_frame_listing(fast).count == COUNT
    assert read_clip(fast, Cut(3, 32, 48), 0.0)[1] == 3
    with pytest.raises(Exception, match="ends after|Invalid|damaged"):
        read_clip(fast, Cut(3, 32, 48), 0.999)


@pytest.mark.parametrize("count", [42, 50])
def test_a_listing_that_promises_too_much(tmp_path, count):
    """Oracle: the number of frames that were written; the window that ends at the last of them is whole."""
    path = write(tmp_path / "a.mkv", moving(COUNT), *LOSSLESS["ffv1.mkv"])
    listing = read_frame_listing(path)._replace(count=count)
    whole_one, real, _ = read_clip(path, Cut(count, 32, 48), listing=listing._replace(count=COUNT))
    assert real == COUNT and torch.equal(whole_one[:COUNT], as_clip(moving(COUNT)))
    for cut, chance in ((Cut(count, 32, 48), None), (Cut(3, 32, 48), 0.999)):
        with pytest.raises(ConfigError, match=f"^ends after {COUNT} of {count} frames$"):
            read_clip(path, cut, chance, listing)
