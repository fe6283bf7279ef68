"""The model section of a DiT: checks its fields with each other and with the rest of the recipe, and makes the
network's arguments, its conditions and its diffusion process from them.
"""

from pathlib import Path
from typing import Any

from pydantic import model_validator

from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.process import ChainProcess, Process
from dstrain.diffusion.schedule import make_betas
from dstrain.encoders import autoencoder
from dstrain.encoders.frozen import is_available_offline
from dstrain.encoders.precision import find_precision_problem
from dstrain.encoders.reader import Reader, ReadsTexts, derive_text_fields_from_cache, replace_text_encoder
from dstrain.nn.lora import list_lora_conflicts
from dstrain.recipe import ConfigError, Run
from dstrain.recipe.shapes import require_divisible_sides
from dstrain.systems.base import list_indivisible_counts
from dstrain.systems.dit.align import Align, require_valid_block_numbers
from dstrain.systems.dit.clips import GivenFrames, Video, list_clip_conflicts
from dstrain.systems.dit.conditions import Condition, ImageEmbedding, Label, Sizes, Text
from dstrain.systems.dit.fields import Fields
from dstrain.systems.dit.first_stage import FirstStage, Latents
from dstrain.systems.dit.presets import PRESETS, SHAPE


class Config(Fields):
    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, model: Any) -> Any:
        """Fills in the fields that the recipe's section leaves out, from the preset that its field `size` names, and
        returns the section. Merges inner sections in the same way. Does not fill in patch_size, hidden_size, depth and
        num_heads: get_network_shape reads these from the preset.
        """
        size = model.get("size") if isinstance(model, dict) else None
        preset = PRESETS.get(size, {}) if isinstance(size, str) else {}
        for name, value in preset.items():
            if name not in SHAPE and isinstance(value, dict) and isinstance(given := model.get(name, {}), dict):
                model = {**model, name: {**value, **given}}
            elif name not in SHAPE and name not in model:
                model = {**model, name: value}
        return model

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Config":
        """Raises ConfigError if fields contradict each other or no network can be built from them. Returns the section
        unchanged, as pydantic asks.
        """
        by_hand = [name for name in SHAPE if getattr(self, name) is not None]
        if self.size is not None and by_hand:
            raise ConfigError(f"size {self.size} sets {', '.join(by_hand)} too; give either size or these")
        if self.size is None and len(by_hand) < len(SHAPE):
            missing = ", ".join(name for name in SHAPE if name not in by_hand)
            raise ConfigError(f"without size, {missing} must be given; or take a size such as DiT-B/2")
        shape, factor = self.get_network_shape(), self.first_stage.factor if self.first_stage else 1
        patch = shape["patch_size"]
        unit = factor * patch
        if (self.image_size % factor or self.input_size % patch) and (self.first_stage or not self.codes):
            raise ConfigError(f"image_size {self.image_size} is no multiple of {unit}, patch_size x factor")
        require_divisible_sides(self.sizes, unit, "patch_size x factor")
        if self.codes is not None:
            factor = self.first_stage.factor if self.first_stage else 1
            self.codes.require_latents_match_input(self.in_channels, self.image_size, self.input_size, factor, patch)
        if shape["hidden_size"] % shape["num_heads"]:
            raise ConfigError("hidden_size must be a multiple of num_heads")
        if shape["hidden_size"] % 4:
            raise ConfigError("hidden_size must be a multiple of 4, which 2-D positions need")
        self._require_consistent_network_choices(shape)
        if self.video:
            aligned = self.align is not None and self.align.kind == "repa"
            self.video.require_clip_compatible_choices(unit, aligned, self.codes is not None, self.embedding_dim)
        self.latents.require_channel_moments(self.in_channels)
        if self.guidance_channels is not None and self.guidance_channels > self.in_channels:
            raise ConfigError(f"guidance_channels {self.guidance_channels} exceeds in_channels {self.in_channels}")
        return self

    def _require_consistent_network_choices(self, network_shape: dict[str, int]) -> None:
        """Raises ConfigError if the choices of blocks, condition tokens, heads and alignment do not fit each other.
        network_shape: what get_network_shape returns.
        """
        if not self.sines and not self.block.rope:
            raise ConfigError("sines: without them and without block.rope no patch has a place; set block.rope=true")
        self._require_consistent_text_fields()
        self._require_valid_joint_blocks(network_shape)
        is_read = self.tokens.label or self.num_classes == 1 or self.reads_texts
        if self.block.modulation == "none" and not (self.tokens.time and is_read):
            raise ConfigError(
                "block.modulation: none leaves the timestep and the label unread; set tokens.time and tokens.label, "
                "such as 4 and 8, or modulation=own"
            )
        if self.block.modulation == "none" and (self.size_conditions or self.embedding_dim):
            raise ConfigError("block.modulation: none reads no sizes and no image embeddings; set modulation=own")
        if self.size_embedding == "pixart" and network_shape["hidden_size"] % 3:
            raise ConfigError(
                f"size_embedding: pixart gives three numbers a third of hidden_size each, which is "
                f"{network_shape['hidden_size']}; take a multiple of 3, or size_embedding=sdxl"
            )
        if self.flow.cosine and self.in_channels == 1:
            raise ConfigError("flow.cosine: over one channel a cosine is a sign; leave it at 0")
        if self.tokens.joins >= network_shape["depth"]:
            raise ConfigError(
                f"tokens.joins: {self.tokens.joins} is not below depth {network_shape['depth']}; give a block"
            )
        for name, width, heads in (
            ("hidden_size", network_shape["hidden_size"], network_shape["num_heads"]),
            *([("wide.hidden_size", self.wide.hidden_size, self.wide.num_heads)] if self.wide else []),
        ):
            if self.block.rope and width // heads % 4:
                raise ConfigError(f"{name}: a head has {width // heads} values; block.rope needs a multiple of 4")
            if self.block.rope and self.video and width // heads < 8:
                raise ConfigError(f"{name}: a head has {width // heads} values; block.rope over three axes needs 8")
            if width % heads:
                raise ConfigError(f"{name}: {width} must be a multiple of its {heads} heads")
        if self.internal and self.internal.depth >= network_shape["depth"]:
            raise ConfigError(f"internal.depth: {self.internal.depth} is not below depth {network_shape['depth']}")
        require_valid_block_numbers(
            self.align,
            self.routing and self.get_routed_block_range(),
            self.internal and self.internal.depth,
            network_shape["depth"],
        )
        if self.internal and self.objective != "flow":
            raise ConfigError("internal: a second head is trained for flows alone; set objective=flow, or leave it out")

    def _require_valid_joint_blocks(self, network_shape: dict[str, int]) -> None:
        """Raises ConfigError if joint blocks do not go with the other choices, or if an image of one of the model's
        sizes has more patches along a side than sines_within allows. network_shape: what get_network_shape returns.
        """
        block = self.block
        if block.dual > (network_shape["depth"] if block.joint else 0):
            raise ConfigError(f"block.dual: there are no {block.dual} joint blocks; set block.joint, and depth")
        plain = type(block)(joint=block.joint, dual=block.dual, qk_norm=block.qk_norm)
        if block.joint and (not self.reads_texts or self.cross_attention or self.tokens.joins):
            raise ConfigError(
                "block.joint: joint blocks read texts from the first block on; set condition=text, and leave out "
                "cross_attention and tokens.joins"
            )
        if block.joint and (block != plain or self.wide):
            raise ConfigError(
                "block.joint: joint blocks have norm=layer, mlp=gelu, modulation=own, no rope and no wide head; leave "
                "these as they are by default"
            )
        if self.sines_within and self.interpolation_scale != 1:
            raise ConfigError("interpolation_scale: sines_within gives the range of places itself; leave it at 1")
        patch = network_shape["patch_size"]
        for size in (None, *(self.sizes or ())) if self.sines_within else ():
            if (longest := max(self.get_input_shape(size)[-2:]) // patch) > self.sines_within[0]:
                raise ConfigError(
                    f"sines_within: a side of {longest} patches is longer than that square, {self.sines_within[0]}; "
                    "give smaller images"
                )

    def _require_consistent_text_fields(self) -> None:
        """Raises ConfigError if the fields on texts contradict each other or the cached text encodings, or if one of
        them is set without condition=text.
        """
        if not self.reads_texts:
            names = "text_encoder", "text_encodings_dim", "cross_attention", "text_pooled_dim"
            given = [name for name in names if getattr(self, name)]
            given += ["null_text"] * (self.null_text == "encoder")
            if given:
                raise ConfigError(
                    f"{given[0]}: with condition=label no text is read; leave it out, or set condition=text"
                )
            return
        self.require_text_encodings_dim()
        if self.text_projection != "linear" and self.text_encodings_dim is None:
            raise ConfigError(
                f"text_projection: {self.text_projection} maps states of a text encoder, and hashed words have a table "
                "instead; set text_encodings_dim to their width (4096 for PixArt's T5), or text_projection=linear"
            )
        if self.text_encodings_dim and self.text_pooled_dim > self.text_encodings_dim:
            raise ConfigError(
                f"text_pooled_dim: {self.text_pooled_dim} values do not fit in the first row of a text's states, whose "
                f"width is text_encodings_dim, {self.text_encodings_dim}; give the width of the encoder's, or leave it "
                "at 0"
            )
        if self.null_text == "encoder" and (self.text_encoder is None or self.text_encodings_dim is None):
            raise ConfigError(
                "null_text: encoder takes the states of an empty text from text_encoder; name it, and its "
                "text_encodings_dim, or write null_text=learned"
            )
        if self.tokens.label:
            raise ConfigError("tokens.label: with condition=text there is no label; leave it at 0")
        if self.codes is not None:
            self.require_matching_cached_texts(self.codes.text, self.codes.text_encoder)

    @classmethod
    def complete_section(cls, model: dict[str, Any], run: Run) -> dict[str, Any]:
        """Returns the recipe's section `model` with values for fields that it leaves out:

        from the data   image_size, in_channels, and frames and height of clips.
        from the cache  in_channels, first_stage.factor, mean and std of latents, and the fields on text encodings.
        from folders    scale, shift and fingerprint of the autoencoder; width and fingerprint of the vision encoder.

        Always replaces sizes, size_conditions and codes by those of the data.
        """
        from_data: dict[str, Any] = {"image_size": run.data.image_size}
        first_stage, index, codes, stage = model.get("first_stage"), run.data.codes, None, None
        if not first_stage:
            from_data["in_channels"] = run.data.channels
        if isinstance(first_stage, dict):
            first_stage = {"image_channels": run.data.channels, **first_stage}
            path = first_stage.get("path")
            # Without these facts another export to the same path would change the latents of a run that goes on.
            if isinstance(path, str) and Path(path).is_dir():
                stage = autoencoder.Autoencoder(path)
                first_stage |= {
                    name: value for name, value in stage.describe_latents().items() if first_stage.get(name) is None
                }
        if index is not None and index.kind == "latents":
            codes = {name: getattr(index, name) for name in ("shape", "scaling_factor", "first_stage")}
            if model.get("condition") == "text":
                codes |= {"text": index.text, "text_encoder": index.text_encoder}
                from_data |= derive_text_fields_from_cache(model, index)
            from_data["in_channels"] = index.shape[0]
            if isinstance(first_stage, dict):
                first_stage = {"factor": max(run.data.image_size // index.shape[1], 1), **first_stage}
        if isinstance(model.get("latents"), dict):
            model = {**model, "latents": Latents.fill_in_channel_moments(model["latents"], index, stage)}
        if isinstance(model.get("align"), dict):
            model = {**model, "align": Align.fill_in_encoder_fields(model["align"])}
        if isinstance(model.get("video"), dict):
            model = {**model, "video": Video.fill_in_clip_shape(model["video"], run)}
        # The section's own codes are replaced: they may be those of another cache.
        replaced = {
            "sizes": None if run.data.durations else run.data.buckets,
            "size_conditions": run.data.size_conditions,
            "codes": codes,
        }
        return {**from_data, **model, **replaced, **({"first_stage": first_stage} if first_stage else {})}

    @classmethod
    def drop_missing_networks(cls, run: Run) -> tuple[Run, str]:
        stage, align = run.model.get("first_stage"), run.model.get("align")
        path = stage.get("path") if isinstance(stage, dict) else None
        here = is_available_offline(path) or run.data.buckets
        if run.model.get("null_text") == "encoder" and not is_available_offline(run.model.get("text_encoder")):
            run = run.model_copy(update={"model": {**run.model, "null_text": "learned"}})  # as long as an empty text
        if isinstance(align, dict) and align.get("path") and not (here and Path(align["path"]).is_dir()):
            # What learns stays: the features come with the samples.
            run = run.model_copy(update={"model": {**run.model, "align": {**align, "path": None}}})
            if here:
                return run, f"note: model.align.path={align['path']} is not here: the encoder is not counted"
        if here:
            return run, ""
        side = run.data.image_size // FirstStage.model_validate(stage).factor
        channels = run.model.get("in_channels", cls.model_fields["in_channels"].default)
        model = {**run.model, "first_stage": None, "image_size": side}
        data = run.data.model_copy(update={"image_size": side, "channels": channels})
        return run.model_copy(update={"model": model, "data": data}), (
            f"note: model.first_stage.path={path} is not here: the network learns from latents of {channels} x "
            f"{side} x {side}, and the autoencoder is not counted"
        )

    def list_conflicts(self, run: Run) -> list[str]:
        problems, samples = self.list_unequal_fields(run, image_size="image_size"), run.samples
        problems += list_clip_conflicts(self.video, run, self.image_size) + list_lora_conflicts(self.lora, run)
        if self.objective == "flow":
            problems += self.flow.list_strata_conflicts(run.batch.global_)
        elif samples.num_steps > self.diffusion.num_steps:
            problems.append(
                f"samples.num_steps={samples.num_steps} is above model.diffusion.num_steps="
                f"{self.diffusion.num_steps}: take fewer"
            )
        if samples.guidance_scale != 1 and not self.class_dropout_prob:
            problems.append(
                f"samples.guidance_scale={samples.guidance_scale} needs a model that was trained without "
                "labels at times: write samples.guidance_scale=1, or model.class_dropout_prob=0.1"
            )
        if self.reads_texts and samples.labels:
            problems.append(
                f"samples.labels={list(samples.labels)}: a model of texts knows no classes; give samples.prompts"
            )
        draws = run.every.sample and (self.first_stage is not None or self.codes is None)
        if self.reads_texts and not self.has_null_text and draws and not samples.prompts:
            problems.append("samples.prompts: no null text to draw without, as class_dropout_prob=0; give prompts")
        if bool(self.embedding_dim) != (run.data.embeddings is not None):
            problems.append(
                "data.embeddings and model.embedding_dim go together, the embeddings of the images and "
                "their width: give both, or neither"
            )
        if self.codes is not None and self.first_stage is None and run.every.sample:
            problems.append(
                f"every.sample={run.every.sample}: pictures need the autoencoder that decodes the latents "
                f"of {run.data.path}; set model.first_stage.path to its folder, or every.sample=0"
            )
        if self.first_stage is None and self.codes is None and run.data.channels != self.in_channels:
            problems.append(
                f"data.channels={run.data.channels} and model.in_channels={self.in_channels} differ, and "
                "there is no model.first_stage between them: make both equal"
            )
        if self.first_stage is not None and self.codes is None:
            problems += filter(
                None, [find_precision_problem(self.first_stage.precision, "model.first_stage.precision")]
            )
        if self.align is not None:
            problems += self.align.list_data_conflicts(self.codes is not None, run.data.channels)
            problems += filter(None, [find_precision_problem(self.align.precision, "model.align.precision")])
        return problems

    def list_conflicts_among_ranks(self, ranks: int) -> list[str]:
        shape, counts = self.get_network_shape(), {}
        for size in (None, *(self.sizes or ())):
            what = "an image" if size is None else f"{size[0]} x {size[1]} pixels"
            counts[f"tokens of {what if self.video is None else 'a clip'}"] = self.count_tokens(
                self.get_input_shape(size)
            )
        if self.video and self.video.beginnings:
            counts["tokens of a first frame, with model.video.beginnings"] = self.count_tokens(
                self.get_input_shape(frames=1)
            )
        joining, what = self.tokens.time + self.tokens.label, "condition tokens of model.tokens"
        if self.reads_texts and not self.cross_attention:
            joining += (
                self.max_text_len - bool(self.text_encodings_dim and self.text_pooled_dim) + self.learns_null_text
            )
            what += " and of texts, with a learned null"
        if joining:
            counts[what] = joining
        counts["attention heads, num_heads"] = shape["num_heads"]
        if self.wide:
            counts["attention heads, model.wide.num_heads"] = self.wide.num_heads
        problems = list_indivisible_counts(ranks, counts)
        if self.routing:
            problems.append(
                f"parallel.sequence={ranks}: with model.routing, ranks would keep unequal numbers of tokens: leave "
                "model.routing out, or write parallel.sequence=1"
            )
        return problems

    @classmethod
    def replace_encoders(
        cls, model: dict[str, Any], text_encoder: str | None = None, tokenizer: str | None = None
    ) -> dict[str, Any]:
        if text_encoder is not None and model.get("condition") == "text":
            model, text_encoder = replace_text_encoder(model, text_encoder, True), None
        return super().replace_encoders(model, text_encoder, tokenizer)

    def make_network_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments with which DiT builds the network of this section."""
        fields = {
            "in_channels",
            "mlp_ratio",
            "class_dropout_prob",
            "num_classes",
            "learn_sigma",
            "time_freq",
            "size_conditions",
            "size_embedding",
            "interpolation_scale",
            "embedding_dim",
            "sines",
            "patch_bottleneck",
            "wide",
            "cross_attention",
            "sines_within",
        }
        reads_labels = not self.reads_texts and (self.block.modulation != "none" or self.tokens.label)
        return {
            "input_size": self.input_size,
            **self.get_network_shape(),
            **self.model_dump(include=fields),
            "block": self.block.model_dump(exclude={"rope", "joint", "dual"}),
            "rope": self.block.rope,
            "joint": self.block.joint,
            "dual": self.block.dual,
            "pooled_dim": self.text_pooled_dim,
            "tokens": self.tokens.model_dump(),
            **({} if reads_labels else {"num_classes": 0}),  # none would be read
            "text": self.make_text_embedder_arguments() | {"projection": self.text_projection}
            if self.reads_texts
            else None,
            "base_depth": self.internal.depth if self.internal else 0,
            "align": self.align.make_network_arguments() if self.align else None,
            "routed": self.get_routed_block_range(),
            "patch_frames": self.video.patch_frames if self.video else 0,
            "given": bool(self.video and self.video.given),
        }

    def make_conditions(self, text_reader: Reader) -> tuple[Condition, ...]:
        """Returns the conditions that the network reads, in this order: text or label, image embedding, sizes, given
        frames. text_reader: the reader that turns texts into inputs of the network.
        """
        conditions: list[Condition] = [Text(text_reader) if self.reads_texts else Label(self.num_classes)]
        if self.embedding_dim:
            conditions.append(ImageEmbedding(self.embedding_dim))
        if self.size_conditions:
            conditions.append(Sizes(self.image_size))
        if self.video and self.video.given:
            conditions.append(GivenFrames(self.video, self.get_input_shape))
        return tuple(conditions)

    def make_process(self) -> Process:
        """Returns the process that adds noise to data and whose reverse the network learns: a flow by the section
        `flow`, or a diffusion chain by the section `diffusion`.
        """
        if self.objective == "flow":
            return self.flow.make_process(self.get_input_shape())
        section = self.diffusion
        diffusion = GaussianDiffusion(
            make_betas(section.schedule, section.num_steps),
            prediction=section.prediction,
            loss=section.loss,
            min_snr=section.min_snr,
            variance="learned_range" if self.learn_sigma else section.fixed_variance,
        )
        return ChainProcess(diffusion, section.schedule, clip=self.learns_pixels)

    def get_fields_shared_with_guide(self) -> dict[str, Any]:
        """Returns the fields about inputs, conditions and noise with their values, by name. A guide (another network
        that guides sampling) must have the same values as this model.
        """
        names = (
            "image_size",
            "size_conditions",
            "embedding_dim",
            "in_channels",
            "num_classes",
            "first_stage",
            "codes",
            "video",
            "text_pooled_dim",
        )
        texts = ("condition", "null_text", *ReadsTexts.model_fields) if self.reads_texts else ("condition",)
        fields: dict[str, Any] = dict.fromkeys((*names, *texts, "objective", self.objective), True)
        # Other fields of the process are of training or of the model's own sampler alone.
        of_flow = {"path", "prediction", "time_scale", "noise_scale"}
        fields[self.objective] = of_flow if self.objective == "flow" else {"schedule", "num_steps", "prediction"}
        return self.model_dump(include=fields)
