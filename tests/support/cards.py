"""The code of an export's card, run in this process, or in one of its own without dstrain, which takes seconds."""

from pathlib import Path

import numpy as np
import torch

from dstrain.commands.export import _measure_relative_difference
from dstrain.runs import card


def difference(writer, system, nets, folder: Path) -> float:
    """Returns how far what the card's code draws is from the trained network, as an export measures it."""
    names: dict = {}
    code = writer.describe_export(system)[2].replace('"OUT', f'"{folder}').replace('"0.png"', f'"{folder / "0.png"}"')
    exec(compile(code, "README.md", "exec"), names)
    drawn = names["images"] if "images" in names else names["image_embeds"]
    drawn = drawn.numpy() if torch.is_tensor(drawn) else np.stack([np.asarray(image) for image in drawn])
    return _measure_relative_difference(drawn, writer.draw_reference_outputs(system, nets))


def draw_stock(writer, system, nets, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the card's example of an export in a process without dstrain. Returns what it drew and what the trained
    networks draw of the same, float32 (N, C, H, W) in levels of 255.
    """
    code = writer.describe_export(system)[2]
    drawn = torch.from_numpy(card.run_example_code(folder, folder.name, code)).movedim(-1, 1).float()
    return drawn, writer.draw_reference_outputs(system, nets).float()
