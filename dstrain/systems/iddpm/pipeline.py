"""Draws from a UNet, by labels or from small pictures. It comes with an export of dstrain; diffusers is all it needs.

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    pipeline(class_labels=[3, 5], generator=torch.Generator().manual_seed(0)).images

The scheduler is DDPMScheduler, with learned variances where there are some.
DDIMScheduler.from_config(pipeline.scheduler.config, timestep_spacing="leading") draws without noise.
"""

import inspect

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class ConditionalUNetPipeline(DiffusionPipeline):
    """enlarges: the unet's input is x and beside it the small picture, stretched. id2label: names of the labels."""

    def __init__(self, unet, scheduler, enlarges=False, id2label=None):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(enlarges=enlarges, id2label=id2label)

    @torch.no_grad()
    def __call__(self, class_labels=None, low_res=None, num_inference_steps=250, generator=None, latents=None,
                 output_type="pil"):
        """A picture for each label and each small picture, low_res (B, C, h, w) in [-1, 1], where the unet takes them.

        latents: the noise to begin from, (B, C, H, W), instead of the generator's. output_type: pil, np or pt.
        ValueError: no such label.
        """
        config, device, scheduler = self.unet.config, self._execution_device, self.scheduler
        y = None if class_labels is None else torch.as_tensor(class_labels, device=device).reshape(-1)
        classes = config.num_class_embeds
        if y is not None and classes is not None and ((y < 0) | (y >= classes)).any():
            raise ValueError(f"class_labels={y.tolist()}: labels are 0 to {classes - 1}")
        channels, count = config.in_channels, len(low_res if y is None else y)
        stretched = None
        if self.config.enlarges:
            low_res, channels = low_res.to(device, self.unet.dtype), channels // 2
            stretched = F.interpolate(low_res, (config.sample_size,) * 2, mode="bilinear", align_corners=False)
        shape = (count, channels, config.sample_size, config.sample_size)
        x = randn_tensor(shape, generator, device, self.unet.dtype) if latents is None else latents.to(device)
        scheduler.set_timesteps(num_inference_steps)
        # dstrain's chain follows the clipped x_start, its noise included.
        options = {"use_clipped_model_output": True, "generator": generator}
        options = {name: value for name, value in options.items()
                   if name in inspect.signature(scheduler.step).parameters}
        learned = ("variance_type" in inspect.signature(type(scheduler).__init__).parameters
                   and scheduler.config.variance_type.startswith("learned"))
        for t in self.progress_bar(scheduler.timesteps):
            seen = x if stretched is None else torch.cat((x, stretched), dim=1)
            out = self.unet(seen, t, class_labels=y).sample
            x = scheduler.step(out if learned else out[:, :channels], t, x, **options).prev_sample
        images = VaeImageProcessor().postprocess(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images)
