"""A DiT as a model of diffusers, where diffusers has none. An export holds this class and the network in one file."""

import sys
from pathlib import Path

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from dstrain.diffusion.interpolant import Interpolant
from dstrain.systems.dit.network import DiT


class ClassTransformer(ModelMixin, DiT, ConfigMixin):
    """The network over square inputs, with labels.

    network               keyword arguments of DiT.
    num_embeds_ada_norm   number of labels, and the number of "no label".
    sample_size           height = width of the input; in_channels: its channels.
    internal_scale        above 1 predictions are led away from those of the second head, see Internal.
    flow                  path, prediction, t_min and time_scale of a flow, see Interpolant; None: a chain of diffusion.
    """

    @register_to_config
    def __init__(self, network, num_embeds_ada_norm, in_channels, sample_size, internal_scale=1.0, flow=None):
        DiT.__init__(self, **network)
        self.time_scale = flow["time_scale"] if flow else 1
        self.flow = Interpolant(flow["path"], flow["prediction"], t_min=flow["t_min"]) if flow else None
        self._source = Path(sys.modules[type(self).__module__].__file__).read_text(encoding="utf-8")

    def forward(self, hidden_states, timestep, class_labels):
        """Predicts: (B, C, H, W), (B,), int64 (B,) -> sample (B, C or 2C, H, W); a flow's first C are velocities."""
        scale = self.config.internal_scale
        found = DiT.forward(self, hidden_states, timestep, class_labels, extras=scale != 1)
        if scale != 1:
            found = found["base"] + scale * (found["out"] - found["base"])
        if self.flow is not None:
            channels, t = hidden_states.shape[1], timestep / self.time_scale
            velocity = self.flow.convert_prediction(found[:, :channels], hidden_states, t, "velocity")
            found = torch.cat((velocity, found[:, channels:]), dim=1)
        return Transformer2DModelOutput(sample=found)

    def save_config(self, save_directory, **kwargs):
        """Saves config.json and this file, where diffusers finds the class: for save_pretrained, push_to_hub."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        name = type(self).__module__.rpartition(".")[2]
        (Path(save_directory) / f"{name}.py").write_text(self._source, encoding="utf-8")
        super().save_config(save_directory, **kwargs)
