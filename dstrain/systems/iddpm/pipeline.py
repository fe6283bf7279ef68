"""Draws pictures with a UNet, for labels or from small pictures. An export contains this file, which imports diffusers
but not dstrain.

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    pipeline(class_labels=[3, 5], generator=torch.Generator().manual_seed(0)).images

The scheduler is a DDPMScheduler, which uses the UNet's variances if it has learned them. To sample without noise, take
DDIMScheduler.from_config(pipeline.scheduler.config, timestep_spacing="leading").
"""

import inspect
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class ConditionalUNetPipeline(DiffusionPipeline):
    """A pipeline of a UNet2DModel that takes labels, small pictures, or both.

    enlarges   whether the UNet's input is x and, as further channels, the small picture stretched to the size of x.
    id2label   {"0": name of label 0, ...}; None: unknown.
    has_null   whether the last row of the UNet's label table means "no label", which guidance needs.
    """

    def __init__(self, unet, scheduler, enlarges=False, id2label=None, has_null=False):
        super().__init__()
        self._source = Path(__file__).read_text(encoding="utf-8")  # read now: diffusers copies other pipelines there
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(enlarges=enlarges, id2label=id2label, has_null=has_null)

    def save_config(self, save_directory, **kwargs):
        """Writes two files into the folder: model_index.json, and a copy of this file as pipeline.py, where diffusers
        looks for the class. save_pretrained and push_to_hub call this.
        """
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / "pipeline.py").write_text(self._source, encoding="utf-8")
        super().save_config(save_directory, **kwargs)

    def to_json_string(self):
        """Returns the text of model_index.json. It gives the class as ["pipeline", NAME], so that from_pretrained looks
        for the class in pipeline.py.
        """
        index = json.loads(super().to_json_string()) | {"_class_name": ["pipeline", type(self).__name__]}
        return json.dumps(index, indent=2) + "\n"

    @torch.no_grad()
    def __call__(
        self,
        class_labels=None,
        low_res=None,
        num_inference_steps=250,
        generator=None,
        latents=None,
        output_type="pil",
        guidance_scale=1.0,
        guidance_interval=None,
    ):
        """Draws one picture for each label in `class_labels` and each small picture in `low_res`, (B, C, h, w) in [-1,
        1], as far as the UNet takes them: one of the two may be None.

        latents: the noise to begin from, (B, C, H, W); None draws it with the generator. output_type: pil, np or pt.
        guidance_interval: (LOW, HIGH), the noise levels sigma / alpha between which predictions are guided; None: all.
        Raises ValueError if labels are missing or out of range, for guidance of a UNet without a null label, and if LOW
        is above HIGH.
        """
        config, device, scheduler = self.unet.config, self._execution_device, self.scheduler
        y = None if class_labels is None else torch.as_tensor(class_labels, device=device).reshape(-1)
        classes = config.num_class_embeds and config.num_class_embeds - self.config.has_null
        if classes is not None and (y is None or ((y < 0) | (y >= classes)).any()):
            raise ValueError(f"class_labels={class_labels}: labels are 0 to {classes - 1}")
        if guidance_scale != 1 and not self.config.has_null:
            raise ValueError(f"guidance_scale={guidance_scale}: this unet was trained without dropped labels")
        channels, count = config.in_channels, len(low_res if y is None else y)
        stretched = None
        if self.config.enlarges:
            low_res, channels = low_res.to(device, self.unet.dtype), channels // 2
            stretched = F.interpolate(low_res, (config.sample_size,) * 2, mode="bilinear", align_corners=False)
        shape = (count, channels, config.sample_size, config.sample_size)
        x = randn_tensor(shape, generator, device, self.unet.dtype) if latents is None else latents.to(device)
        scheduler.set_timesteps(num_inference_steps)
        # As in dstrain's chain, eps is computed anew from the clipped x_start.
        options = {"use_clipped_model_output": True, "generator": generator}
        options = {
            name: value for name, value in options.items() if name in inspect.signature(scheduler.step).parameters
        }
        learned = "variance_type" in inspect.signature(
            type(scheduler).__init__
        ).parameters and scheduler.config.variance_type.startswith("learned")
        low, high = guidance_interval or (0, float("inf"))
        if low > high:
            raise ValueError(f"guidance_interval={guidance_interval}: give (LOW, HIGH)")
        for t in self.progress_bar(scheduler.timesteps):
            out = self._predict_guided(
                x, t, y, stretched, guidance_scale if low <= self._compute_noise_to_signal_ratio(t) <= high else 1
            )
            x = scheduler.step(out if learned else out[:, :channels], t, x, **options).prev_sample
        images = VaeImageProcessor().postprocess(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images)

    def _compute_noise_to_signal_ratio(self, t):
        """Returns sigma / alpha, the noise level at timestep t, as a float; infinity if alpha is 0."""
        kept = float(self.scheduler.alphas_cumprod[int(t)])
        return (1 / kept - 1) ** 0.5 if kept else float("inf")

    def _predict_guided(self, x, t, y, stretched, scale):
        """Returns the UNet's output with classifier-free guidance: without label + scale * (with label - without
        label). Does not guide further channels, which are learned variances: they are those with label. Scale 1 means
        no guidance.
        """
        seen = x if stretched is None else torch.cat((x, stretched), dim=1)
        if scale == 1:
            return self.unet(seen, t, class_labels=y).sample
        null = torch.full_like(y, self.unet.config.num_class_embeds - 1)
        out = self.unet(torch.cat((seen, seen)), t, class_labels=torch.cat((y, null))).sample
        with_label, without = out.chunk(2)
        guided = without[:, : x.shape[1]] + scale * (with_label[:, : x.shape[1]] - without[:, : x.shape[1]])
        return torch.cat((guided, with_label[:, x.shape[1] :]), dim=1)
