"""Run by test_blocks.py on one rank: trains, evaluates and draws with eager and with compiled blocks; figures as JSON.

A case is a system, an index of its CASES, a stage, model.recompute, and further entries of the recipe.
"""

import itertools
import json
from collections import Counter
from pathlib import Path

import torch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.utils import counters

from dstrain import recipe, systems
from dstrain.distributed import group
from dstrain.engine.blocks import Graphs, HostMemory
from dstrain.engine.engines import Engines
from dstrain.engine.start import start_process_group
from dstrain.recipe import ConfigError
from dstrain.sampling.draw import set_eval_mode
from dstrain.systems.base import System
from tests.engine import check_sequence
from tests.engine.check_engines import gathered
from tests.support.cases import CASES, modules, request
from tests.support.engines import engines_for, resolve
from tests.support.launch import ROOT

STEPS, BATCH = 2, 4
PLAIN_COMPILE = torch.compile


def build(folder: Path, name: str, index: int, recompute: object, entries: list[str]) -> tuple[recipe.Run, System]:
    completed = getattr(modules()[name], "completed", lambda config, folder: config)
    model = completed(CASES[name][index], folder) | {"recompute": recompute}
    run = recipe.load_recipe(
        ROOT / "tests/launch/tiny.yaml", [f"batch.micro={BATCH}", f"batch.global={BATCH}", *entries]
    )
    run = run.model_copy(update={"system": name, "model": model})
    system = systems.build(name, model)
    return run, system


def take(system: System, count: int) -> dict[str, torch.Tensor]:
    """The first samples of one synthetic batch."""
    return {name: tensor[:count] for name, tensor in system.synthetic(2 * BATCH).items()}


def train(system: System, engines: Engines) -> list[float]:
    losses = []
    for _ in range(STEPS):
        engines.begin_step(0.01)
        example = system.encode(take(system, BATCH))
        for part in system.turns(0):
            with engines.freeze_all_but(part) as nets:
                loss = system.loss(part, nets, example)["loss"]
                engines.run_backward_and_step(part, loss)
            losses.append(loss.item())
    return losses


def rest(name: str, system: System, engines: Engines, counts: list[int]) -> None:
    """Evaluates and, where the system can, draws for batches of these sizes."""
    nets = engines.modules
    with torch.no_grad(), set_eval_mode(nets):
        for count in counts:
            system.evaluate(nets, system.encode(take(system, count)))
            if type(system).sample is not System.sample:
                system.sample(nets, request(name, system, list(range(count))))


def graphs(engines: Engines) -> dict[tuple, set]:
    """The compiled functions of each kind of block: those with gradients and without."""
    kinds: dict[tuple, set] = {}
    for part, network in engines.modules.items():
        for module in network.modules():
            owner = getattr(getattr(module.forward, "func", None), "__self__", None)
            if isinstance(owner, HostMemory):  # around the compiled function
                owner = module.forward.args[0].func.__self__
            if isinstance(owner, Graphs):
                for (structure, recompute, records, *shapes), compiled in owner._by_kind.items():
                    shapes = [tuple(shape)[1:] if records else tuple(shape) for shape in shapes]
                    kinds.setdefault((part, structure, recompute, *shapes), set()).add(compiled)
    return kinds


def main(folder: Path, cases: list[list], backend: str) -> None:
    inductor.cpp.simdlen = 1  # a third less time for the C++ compiler
    start_process_group()
    figures = {}
    for name, index, stage, recompute, *entries in cases:
        torch._dynamo.reset()
        counters.clear()
        number, alone = Counter(), [1] if name == "dit" else []  # a batch of one has graphs of its own

        def compile_(function, **options):
            def counted(graph, inputs):
                number[compiled] += 1
                return torch._dynamo.lookup_backend(backend)(graph, inputs)

            compiled = PLAIN_COMPILE(function, backend=counted, **options)
            return compiled

        torch.compile = compile_
        losses, state = {}, {}
        for way in ("off", "on"):
            run, system = build(folder, name, index, recompute if way == "on" else "none", [f"compile={way}", *entries])
            settings = resolve(
                {
                    "zero_optimization": {
                        "stage": stage,
                        **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
                    }
                },
                run,
                1,
                "cpu",
            )
            torch.manual_seed(0)
            engines = engines_for(system.networks, run, settings, system.has_weight_decay, system.list_block_classes())
            losses[way] = train(system, engines)
            state[way] = torch.cat(
                [flat.detach().flatten() for masters in engines.masters.values() for flat in masters.flats]
            )
            if way == "on":
                rest(name, system, engines, [BATCH, 3, *alone])
        first = counters["stats"]["unique_graphs"]
        kinds = graphs(engines)
        each = [sum(number[compiled] for compiled in found) for found in kinds.values()]
        breaks = dict(counters["graph_break"])
        rest(name, system, engines, [3, BATCH, *alone, 2])
        train(system, engines)
        figures["-".join(map(str, (name, index, stage, recompute, *entries)))] = {
            "losses": losses,
            "apart": (state["on"] - state["off"]).abs().max().item(),
            "graphs": first,
            "each": each,
            "later": counters["stats"]["unique_graphs"] - first,
            "breaks": [why[:300] for why in breaks],
        }
        print(list(figures)[-1], list(figures.values())[-1], flush=True)
    (folder / "figures.json").write_text(json.dumps(figures))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.inner(x))


def first(recompute: str) -> torch.Tensor:
    """The weights after two steps of a network that begins with a block, whose input has no gradient; at stage 3."""
    run = recipe.Run.model_validate({"batch": {"global": BATCH * group.world()}, "model": {"recompute": recompute}})
    settings = resolve(
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}, run, group.world(), "cpu"
    )

    def networks():
        return {"net": nn.Sequential(Layer(), Layer())}

    engines = engines_for(networks, run, settings, lambda name, weight: False, (Layer,))
    for _ in range(STEPS):
        engines.begin_step(0.01)
        with engines.freeze_all_but("net") as nets:
            engines.run_backward_and_step(
                "net", nets["net"](torch.linspace(-1, 1, 3 * BATCH).view(BATCH, 3)).square().mean()
            )
    masters = engines.masters["net"]
    return torch.cat([value.flatten() for value in gathered(masters, masters.flats).values()])


def learn(folder: Path, recompute: str | int, zero: dict[str, int]) -> dict[str, torch.Tensor]:
    """The weights of a DiT after a few steps with eager blocks."""
    run, system = build(folder, "dit", 0, recompute, [f"batch.global={BATCH * group.world()}", "compile=off"])
    settings = resolve({"zero_optimization": zero}, run, group.world(), "cpu")
    engines = engines_for(system.networks, run, settings, system.has_weight_decay, system.list_block_classes())
    for part in engines:  # biases and gates of zero would hide a mistake
        torch.manual_seed(0)
        shapes = engines.collect_weight_shapes(part).items()
        engines.set_weights(part, [(name, 0.2 * torch.randn(shape)) for name, shape in shapes])
    train(system, engines)
    return {
        name: value for masters in engines.masters.values() for name, value in gathered(masters, masters.flats).items()
    }


def offloaded(path: Path) -> None:
    """By stage, whether blocks whose inputs wait on the host lead to the weights of those that keep theirs."""
    figures = {}
    for stage in range(4):
        kept, sent = (learn(path.parent, recompute, {"stage": stage}) for recompute in ("all", "offload"))
        figures[stage] = all(torch.equal(sent[name], value) for name, value in kept.items())
    if group.rank() == 0:
        path.write_text(json.dumps(figures))


def scattered(path: Path) -> None:
    """How far eager blocks at stage 3, whose weights come and go or stay, lead from those that keep everything."""
    figures, expected = {}, None
    for recompute, keeps in itertools.product(("none", 2, "attention", "all", "offload"), (0, 10**5)):
        weights = learn(path.parent, recompute, {"stage": 3, "stage3_param_persistence_threshold": keeps})
        expected = expected or weights
        figures[f"{recompute} {keeps}"] = max(
            (weights[name] - value).abs().max().item() for name, value in expected.items()
        )
    figures["first"] = (first("attention") - first("none")).abs().max().item()
    if group.rank() == 0:
        path.write_text(json.dumps(figures))


def lead(out: Path) -> None:
    """Trains a DiT at stage 3 without leaves and with some whose inputs have no gradient: losses and norms by leaf, or
    what is said.
    """
    found = {}
    for names in ([], ["x_embedder"], ["blocks.0.attn", "final_layer"], ["t_embedder"]):
        more = {"leaf_module": {"names": names}} if names else {}
        try:
            told = check_sequence.train("dit", 3, 1, stage3_param_persistence_threshold=0, **more)
            found[",".join(names)] = [told["losses"], told["norms"]]
        except ConfigError as error:
            found[",".join(names)] = str(error)
    if group.rank() == 0:
        out.write_text(json.dumps(found))
