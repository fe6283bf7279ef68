"""The KL autoencoder's network: diffusers' AutoencoderKL, with encoder and decoder in one forward pass.

Encoder, decoder and the convolutions between them keep their names, so that the state dict is that of an AutoencoderKL.
diffusers' own forward pass (which draws from torch's generator), tiling and slicing are not used. Images are float in
[-1, 1]; B samples, c latent channels, h = H / factor.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

_LOG_VARIANCE = (-30.0, 20.0)  # the limits in diffusers and in LDM


class KLOutput(NamedTuple):
    """The outputs of one forward pass, for the loss."""

    picture: Tensor  # (B, C, H, W)
    mean: Tensor  # of the posterior, (B, c, h, w)
    log_variance: Tensor  # of the posterior, (B, c, h, w)


class KLAutoencoder(nn.Module):
    """Encodes images to a Gaussian posterior, and decodes latents to images. Arguments are those of AutoencoderKL;
    quant_conv sets its use_quant_conv and use_post_quant_conv.
    """

    def __init__(
        self,
        channels: int,
        block_out_channels: tuple[int, ...],
        layers_per_block: int,
        latent_channels: int,
        norm_num_groups: int,
        quant_conv: bool,
        mid_block_add_attention: bool,
    ) -> None:
        super().__init__()
        from diffusers import AutoencoderKL  # slow to import, and only this network needs it

        levels = len(block_out_channels)
        whole = AutoencoderKL(
            in_channels=channels,
            out_channels=channels,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=block_out_channels,
            layers_per_block=layers_per_block,
            latent_channels=latent_channels,
            norm_num_groups=norm_num_groups,
            use_quant_conv=quant_conv,
            use_post_quant_conv=quant_conv,
            mid_block_add_attention=mid_block_add_attention,
        )
        self.config = whole.config  # the config.json that diffusers saves beside the weights
        self.encoder, self.decoder = whole.encoder, whole.decoder
        self.quant_conv, self.post_quant_conv = whole.quant_conv, whole.post_quant_conv

    def forward(self, x: Tensor, noise: Tensor) -> KLOutput:
        """Encodes images x (B, C, H, W), draws latents from the posterior by standard normal `noise` (B, c, h, w), and
        decodes them. Returns the picture and the posterior.
        """
        mean, log_variance = self.encode(x)
        return KLOutput(self.decode(mean + torch.exp(0.5 * log_variance) * noise), mean, log_variance)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the log variance of the posterior of images: (B, C, H, W) -> float32 (B, c, h, w) each.
        The log variance is clamped to [-30, 20].
        """
        moments = self.encoder(x.to(self.encoder.conv_in.weight.dtype))  # (B, 2c, h, w)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        mean, log_variance = moments.float().chunk(2, dim=1)
        return mean, log_variance.clamp(*_LOG_VARIANCE)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents to images in about [-1, 1]: (B, c, h, w) -> float32 (B, C, H, W). Latents are those of the
        posterior, without a scaling factor.
        """
        latents = latents.to(self.decoder.conv_in.weight.dtype)
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return self.decoder(latents).float()


def get_block_classes() -> tuple[type[nn.Module], ...]:
    """Returns diffusers' classes of the encoder's and of the decoder's blocks. The network has one of each for each
    resolution.
    """
    from diffusers.models.unets.unet_2d_blocks import DownEncoderBlock2D, UpDecoderBlock2D

    return DownEncoderBlock2D, UpDecoderBlock2D
