"""Gaussian diffusion in discrete time: q(x_t | x_start), its posterior, the network's p, losses and bits/dim.

Notation: x_start is data in [-1, 1] (or latents), eps ~ N(0, I), t int64 in [0, T) where 0 means one step of noise,

    x_t = sqrt(alphas_cumprod_t) x_start + sqrt(1 - alphas_cumprod_t) eps                      DDPM, Equation 4
    v   = sqrt(alphas_cumprod_t) eps     - sqrt(1 - alphas_cumprod_t) x_start                  Salimans & Ho 2022

The network is an argument of every method, a callable (x_t, timesteps) -> Tensor; it sees the timesteps of the original
chain even where the chain is respaced. Its output is brought to float32 (float64 stays) at this boundary.

Sources: Ho et al. 2020 (DDPM), Nichol & Dhariwal 2021 (IDDPM: learned variance Equation 15, hybrid loss Equation 16).

Speed: all coefficients are columns of one table (T, K), computed in float64 and moved to a device once. A step gathers
its rows with one index and never makes the host wait.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dstrain.diffusion import schedule
from dstrain.diffusion.likelihood import (
    average_each_sample,
    can_read_without_device_sync,
    compute_discretized_log_likelihood,
    compute_expm1,
    compute_normal_kl,
)
from dstrain.recipe import ConfigError

Network = Callable[[Tensor, Tensor], Tensor]
Noise = Callable[[int], Tensor]  # the i-th draw, i = 0, 1, ...
Progress = Callable[[Iterable[int]], Iterable[int]]  # tqdm and the like; `iter` shows nothing

PREDICTIONS = ("eps", "x_start", "v", "previous_x")
VARIANCES = ("fixed_small", "fixed_large", "learned", "learned_range")
LOSSES = ("mse", "rescaled_mse", "kl", "rescaled_kl")


class GaussianDiffusion:
    """A chain of discrete-time diffusion, with one convention of what the network predicts.

    betas             (T,) of this chain; see schedule.make_betas and schedule.respace_betas.
    prediction        what the first half of the network's channels is: eps | x_start | v | previous_x.
    variance          fixed_small (posterior), fixed_large (beta), learned (log variance is an output), learned_range
                      (an output in [-1, 1] between the two). Learned ones double the network's channels.
    loss              mse (plus the bound in bits where the variance is learned, with no gradient into the mean),
                      rescaled_mse (that bound times T / 1000), kl (the bound), rescaled_kl (the bound times T).
    timestep_map      (T,) timesteps of the original chain; None means that this is the original chain.
    original_steps    length of the original chain; None means T.
    min_snr           the mse is weighed by min(SNR, min_snr) in x_start (Hang et al. 2023); None: not at all.
    rescale_timesteps the network sees float t * 1000 / original_steps instead of int64 t.
    """

    def __init__(
        self,
        betas: Tensor,
        *,
        prediction: str = "eps",
        variance: str = "learned_range",
        loss: str = "mse",
        timestep_map: Sequence[int] | None = None,
        original_steps: int | None = None,
        rescale_timesteps: bool = False,
        min_snr: float | None = None,
    ) -> None:
        for key, value, choices in (
            ("prediction", prediction, PREDICTIONS),
            ("variance", variance, VARIANCES),
            ("loss", loss, LOSSES),
        ):
            if value not in choices:
                raise ConfigError(f"{key}: {value!r} is unknown; one of {', '.join(choices)}")
        if prediction == "eps" and betas[-1] == 1:
            raise ConfigError(
                "prediction: eps tells nothing of x_start at the last timestep, where this schedule "
                "leaves only noise; take prediction v, another schedule, or another number of steps"
            )
        if min_snr is not None and (prediction == "previous_x" or loss not in ("mse", "rescaled_mse")):
            raise ConfigError(
                f"min_snr: it weighs the squared error of eps, x_start or v, and this is loss={loss} of prediction="
                f"{prediction}; leave it out, or take loss mse"
            )
        self.num_timesteps = len(betas)
        self.prediction, self.variance, self.loss = prediction, variance, loss
        self.timestep_map = list(range(len(betas)) if timestep_map is None else timestep_map)
        self.original_steps = original_steps or self.num_timesteps
        self.rescale_timesteps = rescale_timesteps
        self.learns_variance = variance.startswith("learned")
        self.tables = _compute_coefficient_tables(betas.double(), prediction, variance)  # float64 (T,) each, on the CPU
        self.min_snr = min_snr
        if min_snr is not None:
            snr = self.tables["alphas_cumprod"] / (1 - self.tables["alphas_cumprod"])
            divisor = {"eps": snr, "x_start": 1.0, "v": snr + 1}[prediction]
            self.tables["mse_weight"] = snr.clamp(max=min_snr) / divisor
        self._column = {name: k for k, name in enumerate(self.tables)}
        self._stacked: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}
        self._times: dict[torch.device, Tensor] = {}

    def respace(self, spec: str | Sequence[int]) -> "GaussianDiffusion":
        """Returns a shorter chain over a subset of this one's timesteps. `spec` says how many and which, see
        schedule.space_timesteps.
        """
        return self.respace_to_timesteps(schedule.space_timesteps(self.num_timesteps, spec))

    def respace_to_timesteps(self, timesteps: Sequence[int]) -> "GaussianDiffusion":
        """Returns a shorter chain that visits only `timesteps` of this one (ascending, in [0, T)) and has the same
        alphas_cumprod there.
        """
        return GaussianDiffusion(
            schedule.respace_betas(self.tables["betas"], timesteps),
            prediction=self.prediction,
            variance=self.variance,
            loss=self.loss,
            timestep_map=[self.timestep_map[t] for t in timesteps],
            original_steps=self.original_steps,
            rescale_timesteps=self.rescale_timesteps,
            min_snr=self.min_snr,
        )

    def call_network(self, network: Network, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Calls the network at x_t and timesteps t (B,). Returns two tensors of x_t's shape: its prediction, and its
        output for the variance, None if the variance is fixed. Both are float32, or float64 if the network's output is.

        Raises ConfigError if the variance is learned and the output has not twice the channels of x_t.
        """
        out = upcast_output_to_float32(network(x_t, self.convert_timesteps_for_network(t)))
        if not self.learns_variance:
            return out, None
        if out.shape[1] != 2 * x_t.shape[1]:
            raise ConfigError(
                f"variance: {self.variance} needs a network with {2 * x_t.shape[1]} output channels, "
                f"this one has {out.shape[1]}; set learn_sigma, or a fixed variance"
            )
        prediction, values = out.chunk(2, dim=1)
        return prediction, values

    def convert_timesteps_for_network(self, t: Tensor) -> Tensor:
        """Converts timesteps t (B,) of this chain to those that the network gets: timesteps of the original chain,
        int64 (B,), or with rescale_timesteps float32 in [0, 1000).
        """
        if t.device not in self._times:
            with torch.inference_mode(False):
                times = torch.tensor(self.timestep_map)
                if self.rescale_timesteps:
                    times = times.float() * (1000.0 / self.original_steps)
                self._times[t.device] = times.to(t.device)
        return self._times[t.device].index_select(0, t)

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Returns x_t at timesteps t (B,), a sample of q(x_t | x_start): sqrt(alphas_cumprod) * x_start + sqrt(1 -
        alphas_cumprod) * noise (DDPM, Equation 4).
        """
        signal, sigma = self._gather_coefficients(t, x_start, "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod")
        return (signal * x_start).addcmul_(sigma, noise)

    def q_posterior(self, x_start: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the log variance of q(x_{t-1} | x_t, x_start), DDPM, Equation 7. The log variance
        broadcasts to x_t. At t = 0, where the variance would be 0, it is that of t = 1.
        """
        first, second, log_variance = self._gather_coefficients(
            t, x_t, "posterior_mean_coef1", "posterior_mean_coef2", "posterior_log_variance_clipped"
        )
        return torch.addcmul(first * x_start, second, x_t), log_variance

    def compute_training_target(self, x_start: Tensor, x_t: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Returns what the network should predict at x_t, in its shape: eps, x_start, v or the posterior's mean, as
        `prediction` says.
        """
        if self.prediction == "eps":
            return noise
        if self.prediction == "x_start":
            return x_start
        if self.prediction == "previous_x":
            return self.q_posterior(x_start, x_t, t)[0]
        signal, sigma = self._gather_coefficients(t, x_start, "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod")
        return signal * noise - sigma * x_start

    def p_mean_variance(
        self, network: Network, x_t: Tensor, t: Tensor, clip_denoised: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the mean and the log variance of the network's p(x_{t-1} | x_t), and the predicted x_start. The log
        variance broadcasts to x_t. clip_denoised keeps the predicted x_start in [-1, 1], which is for pixels, not for
        latents.
        """
        prediction, values = self.call_network(network, x_t, t)
        x_start = self.predict_x_start(prediction, x_t, t)
        if clip_denoised:
            x_start = x_start.clamp(-1, 1)
        mean = prediction if self.prediction == "previous_x" else self.q_posterior(x_start, x_t, t)[0]
        return mean, self._compute_log_variance(values, x_t, t), x_start

    def predict_x_start(self, prediction: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Converts the network's prediction at x_t and timesteps t (B,) to x_start."""
        if self.prediction == "x_start":
            return prediction
        if self.prediction == "eps":
            of_x_t, of_prediction = self._gather_coefficients(
                t, x_t, "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod"
            )
        elif self.prediction == "v":
            of_x_t, of_prediction = self._gather_coefficients(
                t, x_t, "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod"
            )
        else:  # the posterior mean, solved for x_start
            first, second = self._gather_coefficients(t, x_t, "posterior_mean_coef1", "posterior_mean_coef2")
            return (prediction - second * x_t) / first
        return of_x_t * x_t - of_prediction * prediction

    def predict_eps(self, x_start: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Returns the noise eps that leads from x_start to x_t at timesteps t (B,)."""
        signal, sigma = self._gather_coefficients(t, x_t, "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod")
        return (x_t - signal * x_start) / sigma

    def compute_noise_ratio(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Returns sqrt(1 - alphas_cumprod) / sqrt(alphas_cumprod), (B, 1, ...) with as many axes as x_t, at times t
        (B,) as the network sees them. Right only for a chain that is not respaced.
        """
        if self.rescale_timesteps:
            t = (t * (self.original_steps / 1000)).round().long()
        return self._gather_coefficients(t, x_t, "sqrt_recipm1_alphas_cumprod")[0]

    def _compute_log_variance(self, variance_output: Tensor | None, x_t: Tensor, t: Tensor) -> Tensor:
        """Returns the log variance of p(x_{t-1} | x_t), which broadcasts to x_t. `variance_output` is the network's
        output for the variance, None if it is fixed.
        """
        if self.variance == "learned":
            return variance_output
        if self.variance == "learned_range":  # Equation 15 of IDDPM, about the middle of the range
            middle, half = self._gather_coefficients(t, x_t, "range_middle", "range_half")
            return (half * variance_output).add_(middle)
        return self._gather_coefficients(t, x_t, "fixed_log_variance")[0]

    def training_losses(self, network: Network, x_start: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Returns terms of each sample, (B,) each, at timesteps t (B,):

        loss  the loss, with gradient.
        mse   the mean squared error of the prediction.
        vb    the variational bound's term at t in bits per dimension; only if the variance is learned, or the loss is
              kl or rescaled_kl.
        """
        x_t = self.q_sample(x_start, t, noise)
        prediction, values = self.call_network(network, x_t, t)
        error = prediction - self.compute_training_target(x_start, x_t, t, noise)
        squares = error.square()
        mse = average_each_sample(squares)
        if self.loss in ("kl", "rescaled_kl"):
            vb = self._compute_variational_bound_term(error, squares, mse, values, x_start, t)
            loss = vb * self.num_timesteps if self.loss == "rescaled_kl" else vb
            return {"loss": loss, "mse": mse.detach(), "vb": vb.detach()}
        weighted = mse
        if self.min_snr is not None:
            weighted = self._gather_coefficients(t, x_start, "mse_weight")[0].flatten() * mse
        if not self.learns_variance:
            return {"loss": weighted, "mse": mse.detach()}
        # The bound trains the variance only: the mean gets no gradient from it.
        vb = self._compute_variational_bound_term(error.detach(), squares.detach(), mse.detach(), values, x_start, t)
        if self.loss == "rescaled_mse":
            vb = vb * (self.num_timesteps / 1000.0)
        return {"loss": weighted + vb, "mse": mse.detach(), "vb": vb.detach()}

    def _compute_variational_bound_term(
        self,
        error: Tensor,
        squared_error: Tensor,
        mse: Tensor,
        variance_output: Tensor | None,
        x_start: Tensor,
        t: Tensor,
    ) -> Tensor:
        """Returns the variational bound's term at t in bits per dimension, (B,): the KL divergence of the posterior and
        the network's p; at t = 0 the decoder's negative log-likelihood.

        error            prediction - target.
        squared_error    the squares of `error`.
        mse              the mean of `squared_error` over each sample, (B,).
        variance_output  the network's output for the variance; None if the variance is fixed.

        With u = log variance - log posterior variance, an error of the mean of gain * error, and G = gain^2 / posterior
        variance,

            KL = mean(u - 1 + e^-u (1 + G error^2)) / 2 = (mean(u + (e^-u - 1)(1 + G error^2)) + G mse) / 2

        The second form is computed, since it loses no digits for small u.
        """
        share = self._gather_coefficients(t, x_start, "mean_gain_share")[0]
        ratio = self._compute_log_variance_ratio(variance_output, x_start, t)  # -u
        rest = torch.addcmul(ratio, compute_expm1(ratio), torch.mul(share, squared_error).add_(1), value=-1)
        kl = 0.5 * (share.flatten() * mse - average_each_sample(rest))
        if can_read_without_device_sync(t):  # the costly NLL only for samples at t = 0
            if not t.all():
                first = (t == 0).nonzero().flatten()
                nll = self._compute_decoder_nll(error[first], ratio[first], x_start[first], t[first])
                kl = kl.index_copy(0, first, nll)
        else:  # both for all samples: reading t would wait for the device
            kl = torch.where(t == 0, self._compute_decoder_nll(error, ratio, x_start, t), kl)
        return kl * (1 / math.log(2.0))

    def _compute_decoder_nll(self, error: Tensor, log_variance_ratio: Tensor, x_start: Tensor, t: Tensor) -> Tensor:
        """Returns the negative log-likelihood of x_start under p(x_start | x_1) in nats per dimension, (B,). `error` is
        prediction - target, and `log_variance_ratio` the result of `_compute_log_variance_ratio`.
        """
        gain, log_variance = self._gather_coefficients(t, x_start, "mean_gain", "posterior_log_variance_clipped")
        log_variance = log_variance - log_variance_ratio
        return average_each_sample(
            -compute_discretized_log_likelihood(x_start, x_start + gain * error, 0.5 * log_variance)
        )

    def _compute_log_variance_ratio(self, variance_output: Tensor | None, x: Tensor, t: Tensor) -> Tensor:
        """Returns log(posterior variance / variance of p), which broadcasts to x."""
        if self.variance == "learned_range":
            return (variance_output + 1) * -self._gather_coefficients(t, x, "range_half")[0]
        return self._gather_coefficients(t, x, "posterior_log_variance_clipped")[0] - self._compute_log_variance(
            variance_output, x, t
        )

    def compute_prior_bits_per_dim(self, x_start: Tensor) -> Tensor:
        """Returns KL(q(x_T | x_start) || N(0, I)) in bits per dimension, (B,)."""
        last = torch.full((len(x_start),), self.num_timesteps - 1, device=x_start.device)
        signal, log_variance = self._gather_coefficients(
            last, x_start, "sqrt_alphas_cumprod", "log_one_minus_alphas_cumprod"
        )
        return average_each_sample(compute_normal_kl(signal * x_start, log_variance, 0.0, 0.0)) / math.log(2.0)

    @torch.no_grad()
    def compute_bits_per_dim(
        self, network: Network, x_start: Tensor, noise: Noise, clip_denoised: bool = True, progress: Progress = iter
    ) -> dict[str, Tensor]:
        """Returns terms of the variational bound, by T calls of the network:

        total, prior      (B,) in bits per dimension; total = prior + the sum of vb.
        vb                (B, T) in bits per dimension, the bound's term at each timestep.
        mse, x_start_mse  (B, T), mean squared errors of the predicted eps and x_start.

        Column 0 belongs to the last timestep, T - 1. noise(i) returns the noise of column i. clip_denoised keeps the
        predicted x_start in [-1, 1].
        """
        columns: dict[str, list[Tensor]] = {"vb": [], "mse": [], "x_start_mse": []}
        for draw, step in enumerate(progress(range(self.num_timesteps - 1, -1, -1))):
            t, eps = torch.full((len(x_start),), step, device=x_start.device), noise(draw)
            x_t = self.q_sample(x_start, t, eps)
            mean, log_variance, predicted = self.p_mean_variance(network, x_t, t, clip_denoised)
            if step == 0:
                bound = -compute_discretized_log_likelihood(x_start, mean, 0.5 * log_variance)
            else:
                bound = compute_normal_kl(*self.q_posterior(x_start, x_t, t), mean, log_variance)
            columns["vb"].append(average_each_sample(bound) / math.log(2.0))
            columns["mse"].append(average_each_sample((self.predict_eps(predicted, x_t, t) - eps).square()))
            columns["x_start_mse"].append(average_each_sample((predicted - x_start).square()))
        terms = {name: torch.stack(column, dim=1) for name, column in columns.items()}
        prior = self.compute_prior_bits_per_dim(x_start)
        return {"total": terms["vb"].sum(dim=1) + prior, "prior": prior, **terms}

    def _gather_coefficients(self, t: Tensor, x: Tensor, *names: str) -> list[Tensor]:
        """Returns the chain's coefficients `names` at timesteps t (B,), each (B, 1, ...) with as many axes as x:
        float64 if x is, else float32.
        """
        dtype = x.dtype if x.dtype == torch.float64 else torch.float32
        key = (x.device, dtype, x.ndim)
        if key not in self._stacked:
            with torch.inference_mode(False):
                table = torch.stack(list(self.tables.values()), dim=1).to(x.device, dtype)  # (T, K)
                self._stacked[key] = table.view(*table.shape, *(1 for _ in x.shape[1:]))
        rows = self._stacked[key].index_select(0, t)  # (B, K, 1, ...)
        return [rows.select(1, self._column[name]) for name in names]


def _compute_coefficient_tables(betas: Tensor, prediction: str, variance: str) -> dict[str, Tensor]:
    """Computes all coefficients of the chain with these `betas`, float64 (T,). Returns {name: float64 (T,)}."""
    one = torch.ones(1, dtype=torch.float64)
    alphas_cumprod = torch.cumprod(1 - betas, dim=0)
    previous = torch.cat((one, alphas_cumprod[:-1]))
    posterior_variance = betas * (1 - previous) / (1 - alphas_cumprod)
    # At t = 0 the posterior's variance is 0; its logarithm is taken from t = 1, in a chain of one step from beta.
    clipped = posterior_variance.clone()
    clipped[0] = posterior_variance[1] if len(betas) > 1 else betas[0]
    large = betas.clone()
    large[0] = clipped[0]  # a likelihood at t = 0 needs the smaller one (DDPM, section 3.2)
    low, high = clipped.log(), betas.log()
    first = betas * previous.sqrt() / (1 - alphas_cumprod)
    recipm1 = (1 / alphas_cumprod - 1).sqrt()
    sigma = (1 - alphas_cumprod).sqrt()
    gain = {"eps": -first * recipm1, "v": -first * sigma, "x_start": first, "previous_x": torch.ones_like(betas)}
    return {
        "betas": betas,
        "alphas_cumprod": alphas_cumprod,
        "alphas_cumprod_previous": previous,
        "alphas_cumprod_next": torch.cat((alphas_cumprod[1:], 0 * one)),
        "sqrt_alphas_cumprod": alphas_cumprod.sqrt(),
        "sqrt_one_minus_alphas_cumprod": sigma,
        "log_one_minus_alphas_cumprod": (1 - alphas_cumprod).log(),
        "sqrt_recip_alphas_cumprod": (1 / alphas_cumprod).sqrt(),
        "sqrt_recipm1_alphas_cumprod": recipm1,
        "posterior_variance": posterior_variance,
        "posterior_log_variance_clipped": low,
        "posterior_mean_coef1": first,
        "posterior_mean_coef2": (1 - previous) * (1 - betas).sqrt() / (1 - alphas_cumprod),
        "fixed_log_variance": low if variance == "fixed_small" else large.log(),
        "range_middle": (high + low) / 2,
        "range_half": (high - low) / 2,
        "mean_gain": gain[prediction],
        "mean_gain_share": gain[prediction] ** 2 / clipped,
    }


def upcast_output_to_float32(out: Tensor) -> Tensor:
    """Returns a network's output in float32, or unchanged if it is float64."""
    return out if out.dtype == torch.float64 else out.float()
