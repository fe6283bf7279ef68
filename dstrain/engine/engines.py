"""One DeepSpeed engine for each trained network, with the rules that keep several of them right.

An engine hooks the outputs of its network, so two engines in one graph are silently wrong at stages 1 and 3: `turn`
gives the engine of the part that learns and the bare, frozen networks of the others.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.engine import nonfinite, prepare_environment
from dstrain.engine.initial import Networks, Values, build, full_shape
from dstrain.engine.masters import Masters
from dstrain.engine.settings import offloads_optimizer, stage
from dstrain.ranks import group
from dstrain.recipe import ConfigError, Run

Decays = Callable[[str, Tensor], bool]


def start(timeout_minutes: float = 30) -> None:
    """Joins the process group, told by whichever launcher started this process, or alone.

    A rank that waits for others longer than `timeout_minutes`, whatever for, raises: they are gone, see group.lost.
    """
    prepare_environment()
    place = group.place()
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world), LOCAL_RANK=str(place.local_rank))
    os.environ.setdefault("MASTER_ADDR", _first_host())
    if "MASTER_PORT" not in os.environ:
        # Ranks that share no launcher need one port; a process alone takes any free one.
        os.environ["MASTER_PORT"] = str(_free_port() if place.world == 1 else _job_port())
    import deepspeed
    if torch.cuda.is_available():
        torch.cuda.set_device(group.device())
    if not group.started():
        patience = timedelta(minutes=timeout_minutes)
        # Groups that DeepSpeed and we make beside the first one have torch's own patience, whatever the first one's.
        groups = torch.distributed.distributed_c10d
        groups.default_pg_timeout = groups.default_pg_nccl_timeout = patience
        try:
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=patience)
        except torch.distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) and "in use" not in str(error):
                raise
            raise ConfigError(f"port {os.environ['MASTER_PORT']} is taken, perhaps by another run here: give "
                              "the launcher another, deepspeed --master_port PORT ...") from None
        group.barrier()
        _unlink_buffers()


def _channels_last(_network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Images as NHWC: what follows keeps the layout. The weights lie in ZeRO's flats and cannot."""
    return tuple(_nhwc(x) if torch.is_tensor(x) and x.ndim == 4 else x for x in inputs)


def _nhwc(x: Tensor) -> Tensor:
    if x.shape[1] != 1:
        return x.contiguous(memory_format=torch.channels_last)
    # Of one channel both layouts are the same bytes: the strides alone say which is meant, and torch leaves NCHW's.
    x, (_, _, height, width) = x.contiguous(), x.shape
    return x.as_strided(x.shape, (height * width, 1, width, 1))


def _unlink_buffers() -> None:
    """On CPU DeepSpeed maps 69 MB of shared memory a rank and leaves them behind: once mapped, no name is needed."""
    if group.device().type == "cpu":
        name = f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_*"
        for path in Path("/dev/shm").glob(name):
            path.unlink(missing_ok=True)


def _first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return "127.0.0.1"
    import subprocess
    return subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True,
                          check=True).stdout.split()[0]


def _job_port() -> int:
    return 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10000


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engines(Mapping[str, Any]):
    """The engines by part, in update order; their masters; what is done to all of them together."""

    def __init__(self, networks: Networks, run: Run, settings: dict[str, Any],
                 decays: Decays, blocks: tuple[type[nn.Module], ...] = ()):
        self.settings = settings
        self.notes: list[str] = []                                        # lines for the user
        self._engines: dict[str, Any] = {}
        self._learned: set[str] = set()                                   # parts that had a turn since set_lr
        self.masters: dict[str, Masters] = {}
        compiled = run.compile == "on" or (run.compile == "auto" and torch.cuda.is_available())
        if compiled:                                                      # a UNet's blocks are of more kinds than its 8
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for part, (network, values) in self._build(networks, run.seed).items():
            if run.channels_last:
                network.register_forward_pre_hook(_channels_last)
            if compiled:
                for module in network.modules():
                    if isinstance(module, blocks):
                        module.compile()                                  # in place: names stay, ZeRO still overlaps
            self._engines[part] = self._initialize(network, run, decays)
            self.masters[part] = Masters(self._engines[part])
            self.set_weights(part, values)
            self.masters[part].reset_optimizer_state()

    def _build(self, networks: Networks, seed: int) -> dict[str, tuple[nn.Module, Values]]:
        """Fresh networks and their initial values; at stage 3 in pieces from the start where `build` can."""
        if stage(self.settings) != 3:
            return build(networks, seed)
        import deepspeed
        return build(networks, seed, lambda: deepspeed.zero.Init(config_dict_or_path=self.settings),
                     lambda reason: self.notes.append(
                         f"note: every rank begins with the whole networks in its memory: {reason}; see "
                         "System.networks in dstrain/systems/base.py"))

    def _initialize(self, network: nn.Module, run: Run, decays: Decays) -> Any:
        import deepspeed
        with_decay, without = [], []
        for name, weight in network.named_parameters():
            assert weight.requires_grad, f"{name} is frozen: make it a buffer, or its network one of System.frozen()"
            shaped = torch.empty(full_shape(weight), device="meta")
            assert shaped.numel(), f"{name} has no elements: checkpoints keep fragments, and of it there are none"
            (with_decay if decays(name, shaped) else without).append(weight)
        groups = [{"params": with_decay, "weight_decay": run.optimizer.weight_decay},
                  {"params": without, "weight_decay": 0.0}]
        wanted = {"lr": run.optimizer.lr, "betas": tuple(run.optimizer.betas), "eps": run.optimizer.eps}
        if offloads_optimizer(self.settings):
            optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam([g for g in groups if g["params"]], adamw_mode=True,
                                                            **wanted)
        else:
            optimizer = torch.optim.AdamW([g for g in groups if g["params"]], fused=torch.cuda.is_available() or None,
                                          **wanted)
        return deepspeed.initialize(model=network, optimizer=optimizer, config=dict(self.settings),
                                    dist_init_required=False)[0]

    def __getitem__(self, part: str) -> Any:
        return self._engines[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The bare networks, for sampling and evaluation: every rank calls them in the same order."""
        return {part: engine.module for part, engine in self._engines.items()}

    def shapes(self, part: str) -> dict[str, torch.Size]:
        """Full shapes of a part's trained weights, by name."""
        return {name: full_shape(weight) for name, weight in self[part].module.named_parameters()}

    @torch.no_grad()
    def set_weights(self, part: str, values: Iterable[tuple[str, Tensor]]) -> None:
        """Masters and buffers from full values by state-dict name, one at a time. Buffers keep the precision given."""
        buffers = dict(self[part].module.named_buffers())

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, value in values:
                if name in buffers:
                    buffers[name].data = value.to(buffers[name].device)
                else:
                    yield name, value

        self.masters[part].fill(weights())
        self.masters[part].publish()

    @contextmanager
    def turn(self, part: str) -> Iterator[dict[str, Any]]:
        """Networks for a loss of `part`: its engine live, the others bare and without gradients to their weights."""
        others = {name: engine.module for name, engine in self._engines.items() if name != part}
        thawed = [weight for module in others.values() for weight in module.parameters() if weight.requires_grad]
        for weight in thawed:
            weight.requires_grad_(False)
        try:
            yield {name: self._engines[part] if name == part else others[name] for name in self._engines}
        finally:
            for weight in thawed:
                weight.requires_grad_(True)

    def learn(self, part: str, loss: Tensor) -> None:
        """Backward and, on the last micro-batch, the update. A non-finite gradient updates nothing."""
        self._learned.add(part)
        self._engines[part].backward(loss)
        nonfinite.step(self.masters[part])

    def applied(self) -> dict[str, bool]:
        """For each part that had a turn in this step, whether it changed the weights; a GAN's other part may wait."""
        return {part: masters.applied for part, masters in self.masters.items() if part in self._learned}

    def skipped(self) -> int:
        """Steps that were not applied so far, since the run began."""
        return max(masters.skipped for masters in self.masters.values())

    def set_lr(self, lr: float) -> None:
        """Begins a step: its learning rate, and nobody has learned yet."""
        self._learned.clear()
        for engine in self._engines.values():
            for param_group in engine.optimizer.param_groups:
                param_group["lr"] = lr

    def figures(self) -> dict[str, float]:
        """By part: grad_norm, of the last step before clipping, where it was computed; param_norm, of the fp32 weights;
        loss_scale under fp16. Call on all ranks; it waits for the device, so only in a report.
        """
        figures: dict[str, float] = {}
        for part, masters in self.masters.items():
            prefix = "" if len(self) == 1 else f"{part}/"
            values = {"grad_norm": masters.grad_norm, "param_norm": masters.norm(), "loss_scale": masters.loss_scale}
            figures |= {prefix + name: value for name, value in values.items() if value is not None}
        return figures
