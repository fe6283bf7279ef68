"""The code of an export's card, run in this process: whole exports run it in one of their own, which takes seconds."""

from pathlib import Path

import numpy as np
import torch

from dstrain.commands.export import _measure_difference


def difference(writer, system, nets, folder: Path) -> float:
    """Returns how far what the card's code draws is from the trained network, as an export measures it."""
    names: dict = {}
    code = writer.describe_export(system)[2].replace('"OUT', f'"{folder}').replace('"0.png"', f'"{folder / "0.png"}"')
    exec(compile(code, "README.md", "exec"), names)
    drawn = names["images"] if "images" in names else names["image_embeds"]
    drawn = drawn.numpy() if torch.is_tensor(drawn) else np.stack([np.asarray(image) for image in drawn])
    return _measure_difference(drawn, writer.draw_expected(system, nets))
