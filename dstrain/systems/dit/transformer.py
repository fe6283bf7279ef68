"""A DiT as a model of diffusers, for networks that no class of diffusers can hold. An export has this class and the
network's code in one file.
"""

import sys
from pathlib import Path

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from dstrain.diffusion.interpolant import Interpolant
from dstrain.systems.dit.network import DiT


class ClassTransformer(ModelMixin, DiT, ConfigMixin):
    """A DiT over square inputs with labels, as a model of diffusers.

    network               keyword arguments of DiT.
    num_embeds_ada_norm   number of labels, which is also the number that stands for no label.
    sample_size           height = width of the input; in_channels: its channels.
    internal_scale        scale of internal guidance, away from the second head's predictions, see Internal; 1: none.
    flow                  path, prediction, t_min and time_scale of a flow, see Interpolant; None: a chain of diffusion.
    """

    @register_to_config
    def __init__(self, network, num_embeds_ada_norm, in_channels, sample_size, internal_scale=1.0, flow=None):
        DiT.__init__(self, **network)
        self.time_scale = flow["time_scale"] if flow else 1
        self.flow = Interpolant(flow["path"], flow["prediction"], t_min=flow["t_min"]) if flow else None
        self._source = Path(sys.modules[type(self).__module__].__file__).read_text(encoding="utf-8")

    def forward(self, hidden_states, timestep, class_labels):
        """Returns an object with the field `sample`, the prediction (B, C or 2C, H, W) for inputs (B, C, H, W), times
        (B,) and labels int64 (B,). For a flow its first C channels are velocities.
        """
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
        """Writes config.json into the folder and, beside it, a copy of this class's source file, where diffusers looks
        for the class. save_pretrained and push_to_hub call this.
        """
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        name = type(self).__module__.rpartition(".")[2]
        (Path(save_directory) / f"{name}.py").write_text(self._source, encoding="utf-8")
        super().save_config(save_directory, **kwargs)
