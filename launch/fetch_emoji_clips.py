"""Makes a folder of captioned clips, 477 animated emoji of 256 x 256, from an npm package (165 MB).

    python launch/fetch_emoji_clips.py FOLDER          needs npm; FOLDER is then data.path

X.webp is the file as it is, X.txt the Unicode names of its characters: "chequered flag". Still emoji are left out.
Source: @lobehub/fluent-emoji-anim-1; under which licence the pictures stand is not clear, so pass none of them on.
"""

import io
import re
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from pathlib import Path

from PIL import Image

PACKAGE = "@lobehub/fluent-emoji-anim-1@1.0.0"
SKIN = {0x1F3FB: "light", 0x1F3FC: "medium-light", 0x1F3FD: "medium", 0x1F3FE: "medium-dark", 0x1F3FF: "dark"}


def main(folder: Path) -> None:
    """Fetches the package, writes what moves, and prints how much that is."""
    folder.mkdir(parents=True, exist_ok=True)
    clips = frames = size = 0
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=place, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(Path(place).glob("*.tgz"))) as archive:
            for member in archive:
                name = re.fullmatch(r"package/assets/([0-9a-f-]+)\.webp", member.name)
                if name is None or not member.isreg():
                    continue
                content = archive.extractfile(member).read()
                with Image.open(io.BytesIO(content), formats=("WEBP",)) as image:
                    if image.n_frames == 1:
                        continue
                    frames += image.n_frames
                (folder / f"{name[1]}.webp").write_bytes(content)
                (folder / f"{name[1]}.txt").write_text(caption(name[1]) + "\n")
                clips, size = clips + 1, size + len(content)
    print(f"{folder}: {clips} clips, {frames} frames, {size / 1e6:.1f} MB")


def caption(name: str) -> str:
    """ "1f44b-1f3ff" -> "waving hand sign, dark skin tone"; joiners and variation selectors are not named."""
    codes = [int(code, 16) for code in name.split("-")]
    words = [
        f"{SKIN[code]} skin tone" if code in SKIN else unicodedata.name(chr(code)).lower()
        for code in codes
        if code not in (0x200D, 0xFE0F)
    ]
    return ", ".join(dict.fromkeys(words))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
