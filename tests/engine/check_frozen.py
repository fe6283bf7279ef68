"""Run by test_frozen.py: weights that do not learn, and rates by pattern, against plain torch; figures as JSON.

Takes BEFORE steps, saves, and takes AFTER more; then other engines load the checkpoint and take these again.
"""

import json
from pathlib import Path

import torch
from torch import nn

from dstrain.distributed import group
from dstrain.engine import settings
from dstrain.engine.checkpoint import Checkpoints, read_weights
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.initial import draw_initial_weights
from dstrain.nn.lora import Lora, add_adapters
from dstrain.recipe import Run
from tests.engine.check_elastic import History
from tests.engine.check_engines import CLIP, GLOBAL, SEED, batch, decays, furthest, gathered, recipe, rows
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

BEFORE, AFTER = 3, 3
TRAIN_ONLY = ("first.weight", "tiny/hidden.1.*", "last*")
RATES = {"last*": 0.1, "*.bias": 3.0}


def frozen_recipe(lora: bool, **optimizer) -> Run:
    words = recipe(GLOBAL // group.world()).model_dump(by_alias=True)
    if lora:
        words["optimizer"] |= optimizer
        return Run.model_validate(words)
    words["optimizer"] |= {"rates": RATES} | optimizer
    return Run.model_validate(words | {"train_only": TRAIN_ONLY})


def adapted() -> Tiny:
    """Tiny with adapters around its linear layers."""
    return add_adapters(Tiny(), Lora(rank=2, alpha=6.0, targets=("first", "hidden.*", "last")), ())


def adapted_reference(muon: bool = False) -> dict[str, torch.Tensor]:
    """Plain torch on the whole batch: W + 3 B A by hand, of which AdamW has A and B alone; `muon`: torch's Muon has
    those of the hidden layers, AdamW the others, and the gradient is the mean of the ranks' shares, unclipped.
    """
    network = adapted()
    weights = {name: value.clone() for name, value in draw_initial_weights(network, SEED)}
    learning = {name: value.requires_grad_() for name, value in weights.items() if ".lora_" in name}
    matrices = [value for name, value in learning.items() if muon and name.startswith("hidden")]
    rest = [value for name, value in learning.items() if not (muon and name.startswith("hidden"))]
    optimizers = [torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)]
    if muon:
        optimizers.append(
            torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        )
    shares, plain = group.world() if muon else 1, Tiny()
    for step in range(BEFORE + AFTER):
        for x, y in zip(*(values.chunk(shares) for values in batch(step)), strict=True):
            whole = {}
            for name in plain.state_dict():
                whole[name] = weights[name]
                if name.endswith(".weight"):
                    up, down = (weights[name.replace(".weight", f".lora_{letter}.weight")] for letter in "BA")
                    whole[name] = weights[name] + 3 * up @ down
            ((torch.func.functional_call(plain, whole, (x,)) - y).square().mean() / shares).backward()
        if not muon:
            torch.nn.utils.clip_grad_norm_(learning.values(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: weights[name].detach() for name, _ in network.named_parameters()}


def factor(name: str) -> float:
    """The rate of a weight, by hand."""
    return 0.1 if name.startswith("last") else 3.0 if name.endswith("bias") else 1.0


def reference() -> dict[str, torch.Tensor]:
    """Plain torch on the whole batch, with AdamW on the weights that learn alone."""
    network = Tiny()
    network.load_state_dict(dict(draw_initial_weights(network, SEED)))
    learning = ("first.weight", "hidden.1.weight", "hidden.1.bias", "last.weight")
    groups = []
    for name, weight in network.named_parameters():
        weight.requires_grad_(name in learning)
        if weight.requires_grad:
            decay = 0.1 if weight.ndim >= 2 else 0.0
            groups.append({"params": [weight], "weight_decay": decay, "lr": 0.01 * factor(name)})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(BEFORE + AFTER):
        x, y = batch(step)
        (network(x) - y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}


class Trial:
    def __init__(
        self, stage: int, precision: str, folder: Path, offload: bool = False, lora: bool = False, **optimizer
    ):
        run = frozen_recipe(lora, **optimizer)
        network = adapted if lora else Tiny
        config = {"zero_optimization": {"stage": stage}, "gradient_clipping": "auto"}
        if offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
        if stage == 3:
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 300}
        self.run = run
        blocks = (nn.Sequential,) if run.optimizer.name == "muon" else ()
        self.engines = engines_for(
            lambda: {"tiny": network()}, run, resolve(config, run, group.world(), "cpu"), decays, blocks
        )
        self.masters = self.engines.masters["tiny"]
        self.ema = EmaShadow(self.engines.masters, run.ema, ("tiny",))
        self.saves = Checkpoints(folder, self.engines, self.ema, History())

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.engines.begin_step(self.run.optimizer.compute_lr(step, last))
            x, y = batch(step)
            mine = rows(0, GLOBAL // group.world())
            with self.engines.freeze_all_but("tiny") as nets:
                self.engines.run_backward_and_step("tiny", (nets["tiny"](x[mine]) - y[mine]).square().mean())
            self.ema.update_averages(step, self.engines.collect_part_change_flags())

    def weights(self) -> dict[str, torch.Tensor]:
        """Masters and frozen weights, whole."""
        full = gathered(self.masters, self.masters.flats)
        for own in group.gather_objects(
            [(fragment, values.float()) for fragment, values in self.masters.iterate_frozen_weights_to_save()]
        ):
            for fragment, values in own:
                whole = full.setdefault(fragment.name, torch.full(fragment.shape, torch.nan))
                whole.view(-1)[fragment.start : fragment.start + fragment.numel] = values
        return full

    def outputs(self) -> torch.Tensor:
        with torch.no_grad():
            return self.engines.modules["tiny"](batch(100)[0])


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def measure(stage: int, precision: str, expected: dict, folder: Path, other: int, **words) -> dict:
    trial = Trial(stage, precision, folder, **words)
    trial.steps(0, BEFORE)
    trial.saves.save(BEFORE)  # a thread writes it while the steps below change the weights
    held, inside = trial.weights(), trial.outputs()
    trial.steps(BEFORE, BEFORE + AFTER)
    trial.saves.close()
    ended = trial.weights()
    path = folder / f"step_{BEFORE:08d}"
    again = Trial(stage, precision, folder, **words)
    resumed = {"step": again.saves.resume(), "bits": same(again.weights(), held)}
    resumed["outputs"] = torch.equal(again.outputs(), inside)
    again.steps(BEFORE, BEFORE + AFTER)
    resumed["further"] = same(again.weights(), ended)
    elsewhere = Trial(other, precision, folder, **words)
    elsewhere.saves.resume()
    plain = adapted() if words.get("lora") else Tiny()
    full = dict(draw_initial_weights(plain, SEED))
    owners = gathered(trial.masters, trial.masters.flats)
    still = sorted(held.keys() - owners.keys())
    if precision == "bf16":
        full = {name: value.bfloat16().float() for name, value in full.items()}
    read = {kind: read_weights(path, "tiny", kind) for kind in ("master", "ema.0.9")}
    return {
        "weights": furthest(ended, expected),
        "learned": sorted(owners),
        "still": all(torch.equal(ended[name], full[name]) for name in still),
        "frozen": len(still),
        "empty": any(flat.numel() == 0 for flat in trial.masters.flats),
        "resumed": resumed,
        "elsewhere": same(elsewhere.weights(), held),
        "read": [sorted(weights) == sorted(plain.state_dict()) for weights in read.values()],
        "kept": all(torch.equal(weights[name], held[name]) for weights in read.values() for name in still),
        "counts": trial.engines.count_weights_by_part(()),
        "norm": trial.engines.collect_metrics()["param_norm"],
        "true_norm": torch.cat([weight.double().flatten() for weight in owners.values()]).norm().item(),
    }


def main(folder: Path) -> None:
    expected = reference()
    figures = {
        f"{stage}-{precision}": measure(stage, precision, expected, folder / f"{stage}{precision}", 3 - stage)
        for stage in range(4)
        for precision in ("fp32", "bf16")
    }
    for name in ("lion", "adamw8bit"):
        figures[name] = measure(2, "fp32", expected, folder / name, 3, name=name)
    figures["offload"] = measure(2, "fp32", expected, folder / "offload", 2, offload=True)
    write(folder, figures | measure_adapters(folder))


def measure_adapters(folder: Path) -> dict[str, dict]:
    # torch's Muon computes in bf16 everywhere; ours does so on GPUs and on CPUs that have bf16. These ranks are forked.
    settings.can_cpu_multiply_bf16 = lambda: True
    figures, muon = {}, {"name": "muon", "momentum": 0.95, "clip": 0.0}
    for stage in range(4):
        figures[f"lora-{stage}"] = measure(
            stage, "fp32", adapted_reference(), folder / f"lora{stage}", 3 - stage, lora=True
        )
    for stage in (1, 3):
        figures[f"lora-muon-{stage}"] = measure(
            stage, "fp32", adapted_reference(muon=True), folder / f"muon{stage}", 3 - stage, lora=True, **muon
        )
    return figures


def main_of_adapters(folder: Path) -> None:
    write(folder, measure_adapters(folder))


def write(folder: Path, figures: dict[str, dict]) -> None:
    if group.rank() == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
