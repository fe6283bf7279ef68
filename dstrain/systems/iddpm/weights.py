"""Fitting published weights to a UNet. Names are the same already; many flags leave no trace in a file."""

from torch import Tensor, nn

from dstrain.nn import fitting
from dstrain.systems.iddpm.config import Config

_LABELS = "label_emb.weight"

# What decides a weight's shape or presence: pattern of its name -> the recipe's fields; the first one found counts.
_REMEDIES = (
    (r"^time_embed", "num_channels"),
    (r"^label_emb", "class_cond (and num_channels)"),
    (r"^input_blocks\.0\.0", "small_size (super-resolution sees twice the channels), in_channels and num_channels"),
    (r"^out\.2", "learn_sigma and in_channels"),
    (r"\.emb_layers\.", "use_scale_shift_norm (or channel_mult and num_res_blocks)"),
    (r"_blocks\.\d+\.1\.(norm|qkv|proj_out)", "attention_resolutions (for the image_size of the file)"),
    (r"", "num_res_blocks and channel_mult (or num_channels)"),
)

# Names in the order of a network, so that the first difference is the one nearest to the input.
_ORDER = ("time_embed", "label_emb", "input_blocks", "middle_block", "output_blocks", "out", "in_layers", "emb_layers",
          "out_layers", "skip_connection", "norm", "qkv", "proj_out", "op", "conv", "weight", "bias")

# Flags that leave names and shapes as they are.
_UNTOLD = ("image_size", "small_size", "num_heads", "num_heads_upsample", "dropout", "diffusion_steps",
           "noise_schedule", "rescale_timesteps")


def adapt(state: dict[str, Tensor], network: nn.Module, config: Config) -> tuple[dict[str, Tensor], list[str]]:
    """A state dict that fits `network` (only its names and shapes are read: meta tensors do), and what to know of it.

    A label table with another number of rows is replaced by fresh rows, normal(1) as they are born. The notes also list
    the flags that no file can tell, as the recipe has them: a wrong one gives wrong pictures and no error.
    Raises ValueError at the first other difference, with both shapes and the flags that decide them.
    """
    wanted = fitting.shapes_of(network)
    state, notes = dict(state), []
    if fitting.other_rows(state, wanted, _LABELS):
        rows = len(state[_LABELS])
        state[_LABELS] = fitting.fresh_rows(state[_LABELS], wanted[_LABELS], std=1.0)
        notes.append(f"{_LABELS}: {rows} rows in the file, {len(state[_LABELS])} in the network; replaced by fresh "
                     "rows")
    fitting.require_fit(state, wanted, sorted(wanted.keys() | state.keys(), key=_place), _REMEDIES)
    told = [f"{flag}={getattr(config, flag)}" for flag in _UNTOLD]
    told += [f"{name}={value}" for name, value in config.diffusion_arguments().items()
             if name in ("prediction", "loss") or name == "variance" and not config.learn_sigma]
    notes.append(f"names and shapes fit; what they cannot tell is as the recipe says: {', '.join(told)}")
    return state, notes


def _place(name: str) -> tuple[int, ...]:
    return tuple(int(word) if word.isdigit() else _ORDER.index(word) if word in _ORDER else len(_ORDER)
                 for word in name.split("."))
