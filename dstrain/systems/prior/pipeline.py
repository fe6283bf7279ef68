"""Draws image embeddings from embeddings of texts. An export contains this file, which imports diffusers but not
dstrain.

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    image_embeds = pipeline(text_embed, text_encodings, text_mask)

Notation: B texts of L tokens; D, T and E are the widths of an image embedding, a text embedding and a text encoding.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline, UnCLIPScheduler
from diffusers.utils.torch_utils import randn_tensor
from safetensors.torch import load_file, save_file

_NULL = Path("prior") / "null_text.safetensors"


class PriorPipeline(DiffusionPipeline):
    """A pipeline of a diffusion prior. Its options have the names and meanings of those in the training's recipe, see
    README.md.
    """

    def __init__(
        self,
        prior,
        scheduler,
        normalize_embeds=True,
        num_candidates=2,
        init_image_embed_l2norm=False,
        sampling_clamp_l2norm=False,
        sampling_final_clamp_l2norm=False,
    ):
        super().__init__()
        self._source = Path(__file__).read_text(encoding="utf-8")  # read now: diffusers copies other pipelines there
        self.register_modules(prior=prior, scheduler=scheduler)
        folder = getattr(prior.config, "_name_or_path", None) or "."  # where the prior was read
        file = Path(folder) / _NULL.name
        self.null_text = load_file(file) if folder != "." and file.is_file() else {}
        self.register_to_config(
            normalize_embeds=normalize_embeds,
            num_candidates=num_candidates,
            init_image_embed_l2norm=init_image_embed_l2norm,
            sampling_clamp_l2norm=sampling_clamp_l2norm,
            sampling_final_clamp_l2norm=sampling_final_clamp_l2norm,
        )

    def save_config(self, save_directory, **kwargs):
        """Writes three files into the folder: model_index.json; a copy of this file as pipeline.py, where diffusers
        looks for the class; and prior/null_text.safetensors, if there is a null text. save_pretrained and push_to_hub
        call this.
        """
        (Path(save_directory) / "prior").mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / "pipeline.py").write_text(self._source, encoding="utf-8")
        if self.null_text:
            save_file(self.null_text, Path(save_directory) / _NULL)
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
        text_embed,
        text_encodings=None,
        text_mask=None,
        null_text_embed=None,
        null_text_encodings=None,
        guidance_scale=1.0,
        num_inference_steps=64,
        generator=None,
    ):
        """Draws image embeddings (B, D): for each text it draws num_candidates, and returns the one nearest to the
        text's embedding.

        text_embed (B, T); if the prior reads tokens, also text_encodings (B, up to L, E) and text_mask (B, up to L),
        True for a token; text_mask None: all are tokens. null_text_embed and null_text_encodings, (1, ...), are the
        tensors in prior/null_text.safetensors, which guidance needs.
        """
        device, dtype, options = self._execution_device, self.prior.dtype, self.config
        text = text_embed.to(device, dtype)
        text = F.normalize(text, dim=1) if options.normalize_embeds else text
        tokens = self.prior.config.num_embeddings
        # Without a mask the attention would not be causal, not even where there are no tokens.
        encodings, mask = None, torch.ones(len(text), tokens, dtype=torch.bool, device=device)
        if tokens:
            short = tokens - text_encodings.shape[1]
            encodings = F.pad(text_encodings.to(device, dtype), (0, 0, 0, short))
            mask = mask[:, short:] if text_mask is None else text_mask.to(device).bool()
            mask = F.pad(mask, (0, short))
        count = options.num_candidates
        conditions = [
            None if value is None else value.repeat(count, *[1] * (value.ndim - 1)) for value in (text, encodings, mask)
        ]
        null = [
            None if value is None else value.to(device, dtype).expand(len(conditions[0]), *[-1] * (value.ndim - 1))
            for value in (null_text_embed, null_text_encodings)
        ]
        x = randn_tensor((len(conditions[0]), self.prior.config.embedding_dim), generator, device, dtype)
        x = self._rescale_to_data_norm(x) if options.init_image_embed_l2norm else x
        self.scheduler.set_timesteps(num_inference_steps)
        times = self.scheduler.timesteps
        for t, following in self.progress_bar(list(zip(times, [*times[1:], None]))):
            out = self.prior(x, t, *conditions).predicted_image_embedding
            if guidance_scale != 1:
                without = self.prior(x, t, *null, torch.ones_like(conditions[2])).predicted_image_embedding
                out = without + guidance_scale * (out - without)
            out = self._rescale_predicted_x_start(out, x, t) if options.sampling_clamp_l2norm else out
            respaced = {"prev_timestep": following} if isinstance(self.scheduler, UnCLIPScheduler) else {}
            x = self.scheduler.step(out, t, x, generator=generator, **respaced).prev_sample
        x = self._rescale_to_data_norm(x) if options.sampling_final_clamp_l2norm else x
        drawn = self.prior.post_process_latents(x).unflatten(0, (count, len(text)))  # (count, B, D)
        self.maybe_free_model_hooks()
        if count == 1:
            return drawn[0]
        nearest = F.cosine_similarity(drawn, text[None], dim=2).argmax(dim=0)
        return drawn[nearest, torch.arange(len(text), device=device)]

    def _rescale_to_data_norm(self, x):
        """Returns x (..., D) rescaled to the length that x_start has in training: normalizes x to unit length, then
        divides by clip_std.
        """
        return F.normalize(x, dim=-1) / self.prior.clip_std

    def _rescale_predicted_x_start(self, out, x, t):
        """Returns the network's output `out`, changed so that the x_start it stands for has the same length as in
        training. The scheduler's prediction_type says what the output predicts: x_start, noise or velocity.
        """
        kind, signal = self.scheduler.config.prediction_type, self.scheduler.alphas_cumprod[t].sqrt().to(x.device)
        noise = (1 - signal**2).sqrt()
        x_start = self._rescale_to_data_norm(
            {"sample": out, "epsilon": (x - noise * out) / signal, "v_prediction": signal * x - noise * out}[kind]
        )
        eps = (x - signal * x_start) / noise
        return {"sample": x_start, "epsilon": eps, "v_prediction": signal * eps - noise * x_start}[kind]
