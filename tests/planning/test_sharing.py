"""What a sample keeps for the backward pass on each of the ranks that share it, and what these exchange."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from dstrain import recipe, systems
from dstrain.distributed import group
from dstrain.engine.blocks import wrap_block_forwards
from dstrain.engine.planning.activations import count_activation_bytes
from dstrain.engine.planning.fake_ranks import use_fake_ranks_and_tensors
from dstrain.nn.sequence import share_tokens_among_ranks
from dstrain.planning.watch import Watch
from tests.support.launch import ROOT

RANKS = (1, 2, 4, 8)
# A clip of 33 frames, 69,632 tokens; of its 26 blocks fewer, which are alike.
CASES = {
    "dit-xl2-imagenet512": ["model.first_stage=null", "model.in_channels=4", "model.image_size=64"],
    "phenaki": [
        "model.token_shape=[17,64,64]",
        "model.tokenizer=null",
        "model.text_encoder=null",
        "model.critic=null",
        "model.critic_depth=null",
        "model.recompute=none",
        "model.depth=12",
        "samples.sampler=null",
    ],
}


def keep(name: str) -> list[int]:
    """Bytes by numbers of ranks, of one sample in bfloat16."""
    run = recipe.load_recipe(ROOT / "launch" / "recipes" / f"{name}.yaml", CASES[name])
    system = systems.build(run.system, recipe.complete_model_section(run, systems.find_config_class(run.system)).model)
    with torch.device("meta"):
        networks = system.networks()
    part, network = next(iter(networks.items()))
    network.to(torch.bfloat16)
    wrap_block_forwards(network, system.list_block_classes(), run.model.get("recompute", "none"))
    example = {name: value.to("meta") for name, value in system.encode(system.synthetic(1)).items()}
    present = [*example.values(), *network.parameters(), *network.buffers()]
    sizes = []
    for ranks in RANKS:
        with share_tokens_among_ranks(group.get_neighbour_group(ranks)):
            sizes.append(count_activation_bytes(lambda: system.loss(part, networks, dict(example))["loss"], present))
    return sizes


def work(out: Path) -> None:
    """Counts as rank 0 of 8 ranks, of which the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(RANKS), store=FakeStore())
    out.write_text(json.dumps({name: keep(name) for name in CASES}))
    dist.destroy_process_group()


def test_a_rank_keeps_its_part(in_fork, tmp_path):
    """Oracle: one rank, which keeps all: N ranks that share a sample keep an N-th each, and 8 % at most beside it."""
    in_fork(work, tmp_path / "sizes.json")
    for name, sizes in json.loads((tmp_path / "sizes.json").read_text()).items():
        for ranks, size in zip(RANKS, sizes, strict=True):
            assert size / sizes[0] < 1 / ranks + 0.08, (name, ranks, sizes)


def exchange(out: Path) -> None:
    """Counts what attention of 2 samples, 8 heads of 16 values and 64 tokens, exchanges on rank 0 of 4 of 8 ranks."""
    from dstrain.nn.attention import attend

    with use_fake_ranks_and_tensors(8), Watch() as watch, share_tokens_among_ranks(group.get_neighbour_group(4)):
        query, key, value = (torch.randn(2, 8, 16, 16, requires_grad=True) for _ in range(3))
        attend(query, key, value, shared_stretches=1).sum().backward()
        calls = [(call.operation, call.count, call.bytes, call.ranks) for call in watch.pop_collectives()]
    out.write_text(json.dumps(calls))


def test_what_attention_exchanges(in_fork, tmp_path):
    """Oracle: by hand: queries, keys, values and outputs, forwards and backwards, 2 x 64 x 128 / 4 numbers each."""
    in_fork(exchange, tmp_path / "calls.json")
    assert json.loads((tmp_path / "calls.json").read_text()) == [["all_to_all", 8, 8 * 4 * 2 * 64 * 128 / 4, 4]]
