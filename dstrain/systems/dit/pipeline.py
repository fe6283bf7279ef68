"""A pipeline of diffusers that draws from a class-conditional diffusion transformer. It is part of an export by dstrain
and needs diffusers alone.

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    pipeline([3, 5], guidance_scale=4, generator=torch.Generator().manual_seed(0)).images

Over a diffusion the scheduler is DDIMScheduler. DDPMScheduler.from_config(pipeline.scheduler.config,
variance_type="learned_range", timestep_spacing="linspace") draws with the learned variances, where there are some. Over
a flow it is FlowMatchEulerDiscreteScheduler.
"""

import inspect
import json
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class ClassPipeline(DiffusionPipeline):
    """A pipeline of diffusers that draws an image for each label.

    transformer: predicts; its label number num_embeds_ada_norm stands for no label. vae: decodes latents; None if the
    transformer draws pixels. id2label: names of the labels. guidance_channels: number of leading channels that are
    guided; None: all that are drawn.
    """

    _optional_components = ["vae"]  # noqa: RUF012 (diffusers' own attribute)
    model_cpu_offload_seq = "transformer->vae"

    def __init__(self, transformer, scheduler, vae=None, id2label=None, guidance_channels=None):
        super().__init__()
        self._source = Path(__file__).read_text(encoding="utf-8")  # read now: diffusers copies other pipelines there
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(id2label=id2label, guidance_channels=guidance_channels)

    def save_config(self, save_directory, **kwargs):
        """Writes two files into the folder: model_index.json, and a copy of this file as pipeline.py, where diffusers
        looks for the class. save_pretrained and push_to_hub call this.
        """
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / "pipeline.py").write_text(self._source, encoding="utf-8")
        super().save_config(save_directory, **kwargs)

    def to_json_string(self):
        """Returns the text of model_index.json. It names the files from which from_pretrained imports this class and
        the transformer's.
        """
        index = json.loads(super().to_json_string()) | {"_class_name": ["pipeline", type(self).__name__]}
        library, name = index["transformer"]
        index["transformer"] = [library.rpartition(".")[2], name]  # where it was read from, else: its module here
        return json.dumps(index, indent=2) + "\n"

    @torch.no_grad()
    def __call__(
        self,
        class_labels,
        guidance_scale=1.0,
        num_inference_steps=50,
        generator=None,
        latents=None,
        output_type="pil",
        guidance_interval=None,
    ):
        """Draws an image for each label. latents: the noise to begin from, (B, C, H, W); None: drawn by the generator.

        output_type: pil, np, pt, or latent: what the chain ends with, undecoded. guidance_interval: (LOW, HIGH), the
        noise levels sigma / alpha between which predictions are guided; None: all. Raises ValueError for a label that
        the transformer does not have.
        """
        config, device, scheduler = self.transformer.config, self._execution_device, self.scheduler
        y = torch.as_tensor(class_labels, device=device).reshape(-1)  # (B,)
        if ((y < 0) | (y >= config.num_embeds_ada_norm)).any():
            raise ValueError(f"class_labels={y.tolist()}: labels are 0 to {config.num_embeds_ada_norm - 1}")
        shape = (len(y), config.in_channels, config.sample_size, config.sample_size)
        x = randn_tensor(shape, generator, device, self.transformer.dtype) if latents is None else latents.to(device)
        if "sigmas" in inspect.signature(scheduler.set_timesteps).parameters:
            scheduler.set_timesteps(sigmas=[1 - step / num_inference_steps for step in range(num_inference_steps)])
        else:
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
        for t in self.progress_bar(scheduler.timesteps):
            out = self._predict_guided(
                x, t.to(device), y, guidance_scale if low <= self._compute_noise_to_signal_ratio(t) <= high else 1
            )
            x = scheduler.step(out if learned else out[:, : shape[1]], t, x, **options).prev_sample
        if self.vae is not None and output_type != "latent":
            config = self.vae.config
            if config.get("latents_mean"):  # normalized by channel
                mean, std = (x.new_tensor(config[name]).view(-1, 1, 1) for name in ("latents_mean", "latents_std"))
                x = self.vae.decode(x * std + mean).sample
            else:
                x = self.vae.decode(x / config.scaling_factor + (config.shift_factor or 0)).sample
        images = VaeImageProcessor().postprocess(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images)

    def _compute_noise_to_signal_ratio(self, t):
        """Returns sigma / alpha, the noise level at timestep t, as a float; infinity if alpha is 0."""
        if hasattr(self.scheduler, "alphas_cumprod"):
            kept = float(self.scheduler.alphas_cumprod[int(t)])
            return (1 / kept - 1) ** 0.5 if kept else float("inf")
        if getattr(self.transformer, "flow", None) is not None:
            alpha, sigma = self.transformer.flow.compute_alpha_and_sigma(float(t) / self.transformer.time_scale)
            return sigma / alpha if alpha else float("inf")
        share = float(t) / self.scheduler.config.num_train_timesteps
        return share / (1 - share) if share < 1 else float("inf")

    def _predict_guided(self, x, t, y, scale):
        """Returns the transformer's output with classifier-free guidance of the first guidance_channels channels:
        without label + scale * (with label - without label). All other channels are those with label. Scale 1 means no
        guidance.
        """
        if scale == 1:
            return self.transformer(x, t.expand(len(x)), y).sample
        null = torch.full_like(y, self.transformer.config.num_embeds_ada_norm)
        out = self.transformer(torch.cat((x, x)), t.expand(2 * len(x)), torch.cat((y, null))).sample
        with_label, without = out.chunk(2)
        count = self.config.guidance_channels or x.shape[1]
        guided = without[:, :count] + scale * (with_label[:, :count] - without[:, :count])
        return torch.cat((guided, with_label[:, count:]), dim=1)
