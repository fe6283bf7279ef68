"""Draws from a UNet, by labels or from small pictures. It comes with an export of dstrain; diffusers is all it needs.

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    pipeline(class_labels=[3, 5], generator=torch.Generator().manual_seed(0)).images

The scheduler is DDPMScheduler, with learned variances where there are some.
DDIMScheduler.from_config(pipeline.scheduler.config, timestep_spacing="leading") draws without noise.
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
    """enlarges: the unet's input is x and beside it the small picture, stretched. id2label: names of the labels.

    has_null: the last row of the unet's label table is "no label", which guidance leads away from.
    """

    def __init__(self, unet, scheduler, enlarges=False, id2label=None, has_null=False):
        super().__init__()
        self._source = Path(__file__).read_text(encoding="utf-8")  # read now: diffusers copies other pipelines there
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(enlarges=enlarges, id2label=id2label, has_null=has_null)

    def save_config(self, save_directory, **kwargs):
        """Saves model_index.json and this file, where diffusers finds the class: for save_pretrained, push_to_hub."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / "pipeline.py").write_text(self._source, encoding="utf-8")
        super().save_config(save_directory, **kwargs)

    def to_json_string(self):
        """Returns the index with the class by its file, as from_pretrained asks for."""
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
        """Draws a picture for each label and each small picture, low_res (B, C, h, w) in [-1, 1], where the unet takes
        them.

        latents: the noise to begin from, (B, C, H, W), instead of the generator's. output_type: pil, np or pt.
        guidance_interval: (LOW, HIGH), the noise levels sigma / alpha between which predictions are guided; None: all.
        ValueError: labels are missing, or no such label; guidance of a unet without a null label; HIGH before LOW.
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
        # dstrain's chain follows the clipped x_start, its noise included.
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
                x, t, y, stretched, guidance_scale if low <= self._compute_noise_ratio(t) <= high else 1
            )
            x = scheduler.step(out if learned else out[:, :channels], t, x, **options).prev_sample
        images = VaeImageProcessor().postprocess(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images)

    def _compute_noise_ratio(self, t):
        """Returns sigma / alpha at a timestep."""
        kept = float(self.scheduler.alphas_cumprod[int(t)])
        return (1 / kept - 1) ** 0.5 if kept else float("inf")

    def _predict_guided(self, x, t, y, stretched, scale):
        """Returns the prediction and, behind its channels, the variances of the half with labels."""
        seen = x if stretched is None else torch.cat((x, stretched), dim=1)
        if scale == 1:
            return self.unet(seen, t, class_labels=y).sample
        null = torch.full_like(y, self.unet.config.num_class_embeds - 1)
        out = self.unet(torch.cat((seen, seen)), t, class_labels=torch.cat((y, null))).sample
        with_label, without = out.chunk(2)
        guided = without[:, : x.shape[1]] + scale * (with_label[:, : x.shape[1]] - without[:, : x.shape[1]])
        return torch.cat((guided, with_label[:, x.shape[1] :]), dim=1)
