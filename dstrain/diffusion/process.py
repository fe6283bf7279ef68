"""What a system learns between data and noise, behind one interface: a chain of discrete-time diffusion, or a flow.

A config builds the Process that its recipe asks for. Its system then draws times, computes losses, samples and measures
by the same methods for both. Times are the process's own: timesteps int64 (B,) of a chain, t in [0, 1] of a flow.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dstrain import rng
from dstrain.diffusion import bound, flow, flow_likelihood, samplers
from dstrain.diffusion.densities import DENSITIES, compute_time_shift_by_dimension, stratify_uniforms
from dstrain.diffusion.flow import FlowMatching
from dstrain.diffusion.gaussian import GaussianDiffusion, Network, Noise, Progress
from dstrain.diffusion.interpolant import LOSSES, PATHS, PREDICTIONS
from dstrain.diffusion.published import find_largest_divisor, make_diffusers_scheduler_arguments
from dstrain.diffusion.solvers import count_solver_steps
from dstrain.diffusion.timesteps import UniformSampler
from dstrain.recipe import MAY_CHANGE, ConfigError, Section

_FLOW_STEPS = 20  # of Euler's method, in an export's card
Terms = dict[str, Tensor]


class _Process:
    """Declares what both kinds of process have in common.

    samplers     their names, the usual one last.
    scheduler    name of diffusers' scheduler for an exported model.
    card_steps   steps of the example in an export's model card, in which that scheduler draws as
                 `sample_like_diffusers` does.
    diffusion    the GaussianDiffusion of a chain, None for a flow.
    strata       training times of so many samples in a row lie in as many equal parts; 0: each is drawn alone.
    """

    samplers: ClassVar[tuple[str, ...]]
    scheduler: ClassVar[str]
    card_steps: int
    diffusion: Any = None
    strata: int = 0

    def compute_losses_at_drawn_times(
        self: "Process", network: Network, example: Mapping[str, Tensor], t: Tensor | None = None
    ) -> Terms:
        """Returns the terms of `compute_losses` for a batch, at the times and with the noise that
        `draw_times_and_noise` returns for the same arguments.
        """
        return self.compute_losses(network, example["x_start"], *self.draw_times_and_noise(example, t))

    def draw_times_and_noise(
        self: "Process", example: Mapping[str, Tensor], t: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns training times (B,) and standard normal noise in the shape of x_start (B, C, ...). Draws the noise
        from the samples' keys and, unless t (B,) is given, also the times.

        example  holds `key` int64 (B,) and `x_start`. It may hold `position` and `step`, int64 (B,) each: with
                 `position`, times are spread evenly over any `strata` samples in a row, if the attribute `strata` is
                 not 0.
        """
        key, x_start = example["key"], example["x_start"]
        if t is None:
            uniforms = rng.uniform(key, "timestep")
            if self.strata and "position" in example:
                uniforms = stratify_uniforms(uniforms, example["position"], example.get("step"), self.strata)
            t = self.draw_times(uniforms)
        return t, rng.normal(key, "noise", tuple(x_start.shape[1:]))


class ChainProcess(_Process):
    """A chain of discrete-time diffusion.

    schedule    name of the chain's betas, for `make_diffusers_scheduler_arguments`.
    clip        whether the predicted x_start is kept in [-1, 1]: for pixels, not for latents.
    respacing   a subset of timesteps, see schedule.space_timesteps; "" for all. Samples are drawn over it where as many
                calls are asked for, and bits are measured over it where no number of calls is given.
    """

    samplers = samplers.SAMPLERS
    scheduler = "DDIMScheduler"

    def __init__(self, diffusion: GaussianDiffusion, schedule: str, clip: bool, respacing: str = "") -> None:
        self.diffusion, self.schedule, self.clip = diffusion, schedule, clip
        self.uniform = UniformSampler(diffusion.num_timesteps)
        self.respaced = diffusion.respace(respacing) if respacing else diffusion
        self.card_steps = find_largest_divisor(diffusion.num_timesteps)

    def draw_times(self, uniforms: Tensor) -> Tensor:
        """Returns training timesteps, int64 (B,), uniform over the chain, from uniform numbers (B,) in [0, 1)."""
        return self.uniform.sample(uniforms)[0]

    def compute_losses(self, network: Network, x_start: Tensor, t: Tensor, noise: Tensor) -> Terms:
        """Returns terms of each sample at timesteps t (B,), (B,) each: `loss` and all others of
        GaussianDiffusion.training_losses, and `quartile`, the quarter of the chain in which t lies, 0 to 3.
        """
        terms = self.diffusion.training_losses(network, x_start, t, noise)
        return terms | {"quartile": 4 * t // self.diffusion.num_timesteps}

    def choose_timesteps(self, sampler: str, num_calls: int, spacing: str | None) -> list[int]:
        """Returns the timesteps, ascending, that a sampler visits with `num_calls` calls of the network. If `spacing`
        is None and the recipe's respacing has the right number of timesteps, returns those. Otherwise
        samplers.choose_timesteps chooses.
        """
        is_respaced = self.respaced is not self.diffusion and spacing is None
        if is_respaced and self.respaced.num_timesteps == count_solver_steps(sampler, num_calls):
            return self.respaced.timestep_map
        return samplers.choose_timesteps(self.diffusion, sampler, num_calls, spacing)

    def sample(
        self,
        network: Network,
        x: Tensor,
        noise: Noise,
        sampler: str,
        num_calls: int,
        spacing: str | None = None,
        eta: float | None = None,
    ) -> Tensor:
        """Returns samples x_start, made from standard normal noise x by the named sampler with at most `num_calls`
        calls of the network.

        noise    noise(i) returns the noise that step i adds.
        spacing  which timesteps are visited, see samplers.choose_timesteps.
        eta      how much noise is added, see samplers.sample_chain.
        """
        timesteps = self.choose_timesteps(sampler, num_calls, spacing)
        return samplers.sample_chain(self.diffusion, network, x, noise, sampler, timesteps, eta, self.clip)

    def invert(
        self,
        network: Network,
        x_start: Tensor,
        sampler: str,
        num_calls: int,
        spacing: str | None = None,
        eta: float | None = None,
    ) -> Tensor:
        """Returns the noise from which `sample`, with the same arguments, makes about x_start. Raises ConfigError
        unless the sampler is ddim and eta is None or 0.
        """
        timesteps = self.choose_timesteps(sampler, num_calls, spacing)
        return samplers.invert_chain(self.diffusion, network, x_start, sampler, timesteps, eta)

    def sample_like_diffusers(self, network: Network, x: Tensor) -> Tensor:
        """Returns samples x_start, made from noise x as diffusers' DDIMScheduler makes them in `card_steps` steps."""
        return samplers.sample_ddim(
            self.diffusion.respace(f"ddim{self.card_steps}"), network, x, clip_denoised=self.clip
        )

    def compute_noise_ratio(self, x_t: Tensor, scaled_t: Tensor) -> Tensor:
        """Returns sigma / alpha, (B, 1, ...) with as many axes as x_t, at times `scaled_t` (B,) as the network
        sees them.
        """
        return self.diffusion.compute_noise_ratio(x_t, scaled_t)

    def make_evenly_spaced_times(self, count: int, device: torch.device) -> Tensor:
        """Returns `count` evenly spaced timesteps from the first to the last of the chain, int64 (count,)."""
        return torch.linspace(0, self.diffusion.num_timesteps - 1, count, device=device).long()

    def require_known_spacing(self, spacing: str | None) -> None:
        """Does nothing, since `choose_timesteps` checks the spacing of a chain. FlowProcess checks it in its method of
        this name.
        """

    def measure_bits_per_dim(
        self, network: Network, x_start: Tensor, key: Tensor, num_calls: int | None = None, progress: Progress = iter
    ) -> Terms:
        """Returns terms of the variational bound of pixels x_start (B, C, H, W) in [-1, 1], in bits per dimension, see
        measure_variational_bound. The bound is computed over `num_calls` timesteps; None: over the recipe's respacing.
        """
        chain = self.respaced if num_calls is None else self.diffusion
        return bound.measure_variational_bound(chain, network, x_start, key, num_calls, progress)

    def make_diffusers_scheduler_arguments(self, velocities: bool = False) -> dict[str, Any]:
        """Returns the keyword arguments of diffusers' DDIMScheduler for this chain. `velocities` has no effect; only a
        flow reads it. Raises ConfigError if the scheduler does not know the network's prediction.
        """
        return make_diffusers_scheduler_arguments(self.diffusion, self.schedule, self.clip)


class FlowProcess(FlowMatching, _Process):
    """A flow, built with FlowMatching's arguments. It has the methods of ChainProcess."""

    samplers = flow.SAMPLERS
    scheduler = "FlowMatchEulerDiscreteScheduler"
    card_steps = _FLOW_STEPS

    def __init__(self, strata: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.strata = strata

    def compute_losses(self, network: Network, x_start: Tensor, t: Tensor, noise: Tensor) -> Terms:
        """Returns terms of each sample, (B,) each, at times t (B,): `loss`, `mse`, and `quartile`, the quarter of [0,
        1] in which t lies, 0 to 3.
        """
        terms = self.training_losses(network, x_start, t, noise)
        return terms | {"quartile": (4 * t).long().clamp(max=3)}

    def sample_like_diffusers(self, network: Network, x: Tensor) -> Tensor:
        """Returns samples x_start, made from noise x by Euler's method in `card_steps` (20) steps, as diffusers'
        scheduler makes them.
        """
        return self.sample_euler(network, x, self.card_steps)

    def make_evenly_spaced_times(self, count: int, device: torch.device) -> Tensor:
        """Returns `count` evenly spaced times from data to noise, as the network sees them: (count,) in [0,
        time_scale].
        """
        return torch.linspace(0, self.time_scale, count, device=device)

    def measure_bits_per_dim(
        self, network: Network, x_start: Tensor, key: Tensor, num_calls: int | None = None, progress: Progress = iter
    ) -> Terms:
        """Returns terms of the likelihood of pixels x_start (B, C, H, W) in [-1, 1], in bits per dimension, see
        flow_likelihood.measure_likelihood.
        """
        return flow_likelihood.measure_likelihood(self, network, x_start, key, num_calls, progress)

    def require_known_spacing(self, spacing: str | None) -> None:
        """Raises ConfigError if `spacing` is given and is neither linspace nor karras, the spacings of a flow's
        times.
        """
        flow.require_known_spacing(spacing)

    def make_diffusers_scheduler_arguments(self, velocities: bool = False) -> dict[str, Any]:
        """Returns the keyword arguments of diffusers' FlowMatchEulerDiscreteScheduler for this flow. `velocities`:
        whether the exported network gives velocities on a straight path, whatever the trained one predicts. Raises
        ConfigError if the scheduler cannot express this flow.
        """
        path = self.interpolant
        for name, found, known in (
            ("path", "linear" if velocities else path.path, "linear"),
            ("prediction", "velocity" if velocities else path.prediction, "velocity"),
            ("noise_scale", self.noise_scale, 1.0),
            ("t_last", self.t_last, 0.0),
        ):
            if found != known:
                raise ConfigError(
                    f"flow.{name}: diffusers' FlowMatchEulerDiscreteScheduler has straight paths to the data and "
                    "velocities alone; take --format safetensors"
                )
        if self.time_scale != int(self.time_scale) or self.time_scale < 1:
            raise ConfigError(
                f"flow.time_scale: {self.time_scale:g} is no whole number, which FlowMatchEulerDiscreteScheduler takes "
                "as num_train_timesteps; take --format safetensors"
            )
        return {"num_train_timesteps": int(self.time_scale), "shift": self.shift}


Process = ChainProcess | FlowProcess


class Sde(Section):
    coefficient: Annotated[Literal[flow.COEFFICIENTS], MAY_CHANGE] = "sigma"
    """Of its noise along the way, times samples.eta: constant 1, sigma, sbdm (by which the path is a diffusion), linear
    t, decreasing or increasing-decreasing from noise to data. eta 2 is SiT's diffusion norm of 1."""
    last: Annotated[Literal[flow.LAST_STEPS], MAY_CHANGE] = "euler"
    """Its last step: euler, the ODE's; mean, without noise; tweedie, the prediction of data; none, as all others."""
    last_size: Annotated[float, MAY_CHANGE] = Field(0.0, ge=0, lt=1)
    """Length of the last step, before the shift (SiT: 0.04); 0: as all others; read where times are even."""


class Flow(Section):
    density: Literal[tuple(DENSITIES)] = "logit_normal"
    """Distribution of training times: normal of logit(t), which on a straight path is log(noise / signal) as in EDM,
    uniform, or SD3's mode and cosmap."""
    logit_mean: float = 0.0
    """Mean of logit(t); above 0 more noise."""
    logit_std: float | None = Field(1.0, gt=0)
    """Standard deviation of logit(t), or the scale of mode; None makes t uniform."""
    t_max: float = Field(1.0, gt=0, le=1)
    """The largest training time, before the shift; 1 for mode."""
    t_last: Annotated[float, MAY_CHANGE] = Field(0.0, ge=0, lt=1)
    """Sampling ends at this time, before the shift, and takes what it has (RAE: 0.001); 0: at the data."""
    shift: Annotated[float, Field(gt=0)] | Literal["dimension"] = 1.0
    """Shift of training and sampling times; 1 is none, above 1 more noise (for higher resolutions); dimension takes the
    square root of (values of an input / 4096)."""
    time_scale: float = Field(1000.0, gt=0)
    """The network sees t in [0, 1] times this."""
    path: Literal[tuple(PATHS)] = "linear"
    """Between data and noise: linear, gvp (of constant variance) or vp (DDPM's linear betas)."""
    prediction: Literal[PREDICTIONS] = "velocity"
    """What the network predicts."""
    loss: Literal[LOSSES] | None = None
    """The space of squared errors, likelihood with SiT's weight; None: the prediction's own, and eps for a score."""
    t_min: float = Field(0.0, ge=0, lt=0.5)
    """Conversions between predictions take no time nearer to 0 and 1 than this; needed where they divide by it."""
    cosine: float = Field(0.0, ge=0)
    """Weight of 1 - the cosine over channels of prediction and target, beside the squared error (LightningDiT: 1)."""
    noise_scale: float = Field(1.0, gt=0)
    """Standard deviation of the noise (JiT at 512 pixels: 2)."""
    strata: int = Field(0, ge=0)
    """Training times of so many samples in a row lie in as many equal parts of the density, one in each, so that a
    batch has all; such as batch.global. 0: each is drawn alone."""
    sde: Sde = Sde()
    """Read by the samplers sde and sde-heun."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Flow":
        """Returns the section. Raises ConfigError if t_min is 0 and a conversion would divide by it, if the density is
        mode and t_max is below 1, or if sde.last_size is neither 0 nor above t_last.
        """
        if not self.t_min and (self.prediction != "velocity" or self.path == "vp" or self.loss == "likelihood"):
            raise ConfigError(
                f"flow.t_min: 0 divides by 0 where prediction={self.prediction}, path={self.path} and loss={self.loss} "
                "are converted; set flow.t_min, such as 0.05 for predictions of x and 0.001 for others"
            )
        if self.density == "mode" and self.t_max < 1:
            raise ConfigError("flow.t_max: the density mode is not cut; leave it at 1, or take another density")
        if 0 < self.sde.last_size <= self.t_last:
            raise ConfigError(
                f"flow.sde.last_size: {self.sde.last_size} is not above flow.t_last {self.t_last}, where sampling "
                "ends; give more, or 0"
            )
        return self

    def list_strata_conflicts(self, global_batch: int) -> list[str]:
        """Returns [one error message] if `strata` does not divide the global batch size; [] otherwise."""
        if not self.strata or global_batch % self.strata == 0:
            return []
        return [
            f"model.flow.strata={self.strata} does not divide batch.global={global_batch}: take {global_batch}, or 0"
        ]

    def make_process(self, shape: tuple[int, ...]) -> FlowProcess:
        """Returns the flow that this section describes, for inputs of `shape`, such as (C, H, W), without the batch
        axis.
        """
        arguments = {**self.model_dump(exclude={"sde"}), **self.sde.model_dump()}
        if self.shift == "dimension":
            arguments["shift"] = compute_time_shift_by_dimension(math.prod(shape))
        return FlowProcess(**arguments)
