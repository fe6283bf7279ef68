"""Run by test_deepspeed_files.py on 2 ranks: FOLDER/CASE/ of DeepSpeed's own checkpoints and of dstrain's.

FOLDER/truth.pt holds, by case, the live weights as the module's state dict names them; of DeepSpeed's also what its
zero_to_fp32 gives, or says; of dstrain's the averages that one process computes from the full weights.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.start import start_process_group
from dstrain.recipe import Save
from tests.engine.check_elastic import History
from tests.engine.check_engines import EMA, GLOBAL, batch, decays, gathered, recipe, rows
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

STAGES, PRECISIONS = (1, 2, 3), ("fp32", "bf16")
STEPS = 3


class Plain(nn.Module):
    """What people train: a tied weight, frozen ones (one of them tied, too), buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.conv = nn.Conv2d(3, 5, 2)
        self.odd = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.again.weight = self.frozen.weight
        for module in (self.frozen, self.conv):
            module.requires_grad_(False)
        self.register_buffer("table", torch.linspace(0, 1, 7) / 3)
        self.register_buffer("turned", torch.linspace(-1, 1, 12).reshape(3, 4).t())
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.embed(tokens)) + self.again(self.embed(tokens)))
        return self.head(x).float() * self.odd.float().sum()


def deepspeeds(folder: Path, stage: int, precision: str) -> dict:
    """Trains, saves with a tag, reads it again with zero_to_fp32."""
    torch.manual_seed(0)
    network = Plain()
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 10, "sub_group_size": 40}
    if precision != "fp32":
        config["bf16"] = {"enabled": True}
    if precision == "accumulated":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    weights = [p for p in network.parameters() if p.requires_grad]
    groups = [{"params": [p for p in weights if p.ndim >= 2]}, {"params": [p for p in weights if p.ndim < 2]}]
    engine = deepspeed.initialize(model=network, config=config, optimizer=torch.optim.AdamW(groups, lr=0.05))[0]
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(0, 11, (2, 4), generator=generator)).square().mean())
        engine.step()
    engine.save_checkpoint(str(folder), tag="third")

    live = {}
    with deepspeed.zero.GatheredParameters(list(network.parameters()), enabled=stage == 3):
        whole = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
        named = dict(network.named_parameters(remove_duplicate=False))
    masters = {id(p): safe_get_full_fp32_param(p) for p in network.parameters() if p.requires_grad} if stage else {}
    for name, tensor in whole.items():
        master = masters.get(id(named[name])) if name in named else None
        live[name] = (tensor if master is None else master.reshape(tensor.shape)).detach().clone()
    group.barrier()
    oracle, words = {}, ""
    if group.rank() == 0:
        try:
            oracle = {name: tensor.clone() for name, tensor in get_fp32_state_dict_from_zero_checkpoint(folder).items()}
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
    return {"live": live, "oracle": oracle, "words": words}


def dstrains(folder: Path, stage: int, precision: str) -> dict:
    run = recipe(GLOBAL // group.world())
    config = {"zero_optimization": {"stage": stage}}
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 300}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    engines = engines_for(lambda: {"tiny": Tiny()}, run, resolve(config, run, group.world(), "cpu"), decays)
    masters, ema = engines.masters["tiny"], EmaShadow(engines.masters, run.ema, ("tiny",))
    naive = {decay: gathered(masters, masters.flats) for decay in EMA.decays}
    for step in range(STEPS):
        x, y = batch(step)
        mine = rows(0, GLOBAL // group.world())
        with engines.freeze_all_but("tiny") as nets:
            engines.run_backward_and_step("tiny", (nets["tiny"](x[mine]) - y[mine]).square().mean())
        ema.update_averages(step, engines.collect_part_change_flags())
        full = gathered(masters, masters.flats)
        for decay, shadow in naive.items():
            for name, value in shadow.items():
                value.lerp_(full[name], 1 - EMA.compute_effective_decay(decay, step))
    Checkpoints(folder, engines, ema, History()).save(STEPS, last=True)
    if stage:
        Checkpoints(folder.with_name(f"{folder.name}-native"), engines, ema, History(), Save(format="deepspeed")).save(
            STEPS, last=True
        )
    buffers = {"scale.table": engines.modules["tiny"].scale.table.clone()}
    return {"raw": full | buffers, **{f"ema:{decay!r}": shadow | buffers for decay, shadow in naive.items()}}


def main(folder: Path) -> None:
    start_process_group()
    truth = {}
    for stage in STAGES:
        for precision in PRECISIONS:
            truth[f"plain{stage}-{precision}"] = deepspeeds(folder / f"plain{stage}-{precision}", stage, precision)
    truth["plain1-accumulated"] = deepspeeds(folder / "plain1-accumulated", 1, "accumulated")
    truth["plain0-fp32"] = deepspeeds(folder / "plain0-fp32", 0, "fp32")
    truth["plain0-bf16"] = deepspeeds(folder / "plain0-bf16", 0, "bf16")
    for stage in (0, *STAGES):
        for precision in PRECISIONS:
            truth[f"ours{stage}-{precision}"] = dstrains(folder / f"ours{stage}-{precision}", stage, precision)
    if group.rank() == 0:
        torch.save(truth, folder / "truth.pt")
        (folder / "words.json").write_text(json.dumps({k: v.get("words") for k, v in truth.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
