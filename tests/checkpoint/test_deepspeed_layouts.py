"""Files laid out by hand as DeepSpeed lays them out, on any number of ranks; its own: test_deepspeed_files.py."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dstrain.checkpoint import deepspeed_files, torch_files
from dstrain.checkpoint.safetensors_io import write_huggingface_model
from dstrain.recipe import ConfigError

SHAPES = [{"a.weight": (3, 5), "a.bias": (), "b.weight": (2,)}, {"c.weight": (4, 1, 3), "d": (1,)}]  # two groups
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"


def numbers(shape: tuple[int, ...], begin: int) -> Tensor:
    return torch.arange(begin, begin + math.prod(shape), dtype=torch.float32).view(shape)


def weights() -> dict[str, Tensor]:
    return {
        name: numbers(shape, 100 * number)
        for number, (name, shape) in enumerate((name, shape) for group in SHAPES for name, shape in group.items())
    }


def common(**more) -> dict:
    """What every rank's model file holds; the frozen weight and the buffers are none of the optimizer's."""
    module = {name: value.bfloat16() for name, value in weights().items()}
    module |= {"half": torch.tensor([1.5, 2.5]).bfloat16(), "count": torch.arange(3), "frozen": numbers((5,), 70)}
    return {
        "module": module,
        "buffer_names": ["half", "count"],
        "param_shapes": SHAPES,
        "global_steps": 12,
        "ds_version": "0.19.1",
        "ds_config": {"zero_optimization": {"stage": 2}},
        **more,
    }


def sharded(folder: Path, world: int, flats: int = 1) -> None:
    """Stage 3: each weight in equal shares, the last one padded with NaN; a rank's in one flat or in several."""
    for rank in range(world):

        def share(value: Tensor) -> Tensor:
            size = -(-value.numel() // world)
            own = value.flatten()[rank * size : (rank + 1) * size]
            return torch.cat([own, torch.full((size - len(own),), math.nan)])

        content = common()
        content["frozen_param_shapes"] = {"frozen": (5,)}
        content["frozen_param_fragments"] = {"frozen": share(content["module"]["frozen"])}
        content["module"] = {
            name: value if name in content["buffer_names"] else torch.empty(0)
            for name, value in content["module"].items()
        }
        torch.save(content, folder / f"zero_pp_rank_{rank}_{MODEL}")
        line = torch.cat([share(value) for value in weights().values()])
        pieces = [piece.clone() for piece in line.tensor_split(flats)]
        state = {"fp32_flat_groups": pieces, "partition_count": world, "zero_stage": 3}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_{OPTIMIZER}")


def partitioned(folder: Path, world: int, gaps: tuple[int, ...] = (), **more) -> None:
    """Stages 1 and 2: a group's weights in a line, each with a gap behind it, which the ranks' partitions cut."""
    torch.save(common(**more), folder / MODEL)
    partitions: list[list[Tensor]] = [[] for _ in range(world)]
    for group in SHAPES:
        line = torch.cat(
            [
                piece
                for number, name in enumerate(group)
                for piece in (weights()[name].flatten(), torch.full((gaps[number] if gaps else 0,), math.nan))
            ]
        )
        line = torch.cat([line, torch.full((-len(line) % world,), math.nan)])
        for rank, piece in enumerate(line.chunk(world)):
            partitions[rank].append(piece.clone())
    for rank, own in enumerate(partitions):
        state = {"single_partition_of_fp32_groups": own, "partition_count": [world] * 2, "zero_stage": 2}
        state |= {"param_alignment_paddings": [list(gaps[: len(group)]) for group in SHAPES]} if gaps else {}
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_zero_pp_rank_{rank}_{OPTIMIZER}")


class Address:
    """Where a piece of a weight lies in a rank's partition, as DeepSpeed since 0.8 writes it."""

    def __init__(self, start: int, numel: int):
        self.start, self.numel = start, numel


def mapped(folder: Path, world: int, less: int = 0) -> None:
    """As `partitioned`, with the addresses of pieces; on each rank that of c.weight is too short by `less`."""
    partitioned(folder, world)
    for rank in range(world):
        path, mappings = folder / f"bf16_zero_pp_rank_{rank}_{OPTIMIZER}", []
        state = torch.load(path)["optimizer_state_dict"]
        for group, own in zip(SHAPES, state["single_partition_of_fp32_groups"]):
            begin, end, place = rank * len(own), (rank + 1) * len(own), 0
            pieces = {}
            for name, shape in group.items():
                first, last = max(place, begin), min(place + math.prod(shape), end)
                if first < last:
                    pieces[name] = Address(first - begin, last - first)
                place += math.prod(shape)
            mappings.append(pieces)
        if "c.weight" in mappings[1]:
            mappings[1]["c.weight"].numel -= less
        torch.save({"optimizer_state_dict": state | {"param_slice_mappings": mappings}}, path)


def altered(path: Path, **changes) -> None:
    content = torch.load(path)
    torch.save(content | changes, path)


def read(folder: Path) -> tuple[dict[str, Tensor], deepspeed_files.Checkpoint]:
    checkpoint = deepspeed_files.read_deepspeed_checkpoint(folder, True, "F32")
    write_huggingface_model(folder / "out", checkpoint.entries, 10**9, {}, lambda count: None)
    return load_file(folder / "out" / "model.safetensors"), checkpoint


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "lay",
    [
        lambda folder, world: sharded(folder, world),
        lambda folder, world: sharded(folder, world, 3),
        partitioned,
        mapped,
        lambda folder, world: partitioned(folder, world, (2, 0, 5)),
        lambda folder, world: partitioned(
            folder, world, frozen_param_shapes={"frozen": (5,)}, frozen_param_fragments={"frozen": numbers((5,), 70)}
        ),
    ],
)
def test_any_number_of_ranks(tmp_path, lay, world):
    """Oracle: the weights that were cut: the ranks' files give each element, none of the padding, and buffers, of which
    halves become float32; names in the network's order; what else the files say.
    """
    lay(tmp_path, world)
    tensors, checkpoint = read(tmp_path)
    expected = weights() | {"half": torch.tensor([1.5, 2.5]), "count": torch.arange(3), "frozen": numbers((5,), 70)}
    assert [entry.name for entry in checkpoint.entries] == list(expected) and checkpoint.tied == {}
    assert all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in expected.items()
    )
    storages = [(span.path, span.offset, span.offset + span.nbytes) for span in checkpoint.sums]
    for span in (span for entry in checkpoint.entries for span in entry.source.spans):
        assert (
            sum(
                path == span.path and first <= span.offset and span.offset + span.nbytes <= last
                for path, first, last in storages
            )
            == 1
        )
    assert not any(torch_files.are_bytes_altered(*item) for item in checkpoint.sums.items())
    stage = 3 if (tmp_path / f"zero_pp_rank_0_{MODEL}").exists() else 2
    assert checkpoint.facts == {"step": 12, "stage": stage, "world": world, "deepspeed": "0.19.1", "left_out": []}


def test_tied_weights_and_objects(tmp_path):
    """Oracle: by hand: a name of the same memory, with and without DeepSpeed's list; objects that are no tensors."""
    partitioned(tmp_path, 2)
    content = torch.load(tmp_path / MODEL)
    module = content["module"]
    module |= {"head": module["a.weight"], "again": module["c.weight"], "state": {"x": 1}, "b.state": None}
    torch.save(content | {"shared_params": {"head": "a.weight"}}, tmp_path / MODEL)
    tensors, checkpoint = read(tmp_path)
    assert checkpoint.tied == {"head": "a.weight", "again": "c.weight"}
    assert checkpoint.facts["left_out"] == ["state", "b.state"]
    for name, holder in checkpoint.tied.items():
        assert torch.equal(tensors[name], weights()[holder])


def test_ties_that_are_only_listed(tmp_path):
    """Oracle: DeepSpeed's list: at stage 3 a network's file holds no memory that would show a tie."""
    sharded(tmp_path, 2)
    content = torch.load(tmp_path / f"zero_pp_rank_0_{MODEL}")
    content["module"] = {"head": torch.empty(0)} | content["module"]
    torch.save(content | {"shared_params": {"head": "c.weight"}}, tmp_path / f"zero_pp_rank_0_{MODEL}")
    tensors, checkpoint = read(tmp_path)
    assert checkpoint.tied == {"head": "c.weight"} and torch.equal(tensors["head"], weights()["c.weight"])


def test_without_a_partition(tmp_path):
    """Oracle: the network's own weights, at stage 0 in fp32; in less they are refused, as are missing masters."""
    module = weights() | {"half": torch.ones(2).bfloat16(), "head": (own := weights()["d"])}
    module["d"] = own
    torch.save(common(module=module, buffer_names=["half"], param_shapes=None), tmp_path / MODEL)
    tensors, checkpoint = read(tmp_path)
    assert checkpoint.facts["world"] == 1 and list(tensors.keys() - module.keys()) == []
    assert all(torch.equal(tensors[name], value.float()) for name, value in module.items())
    altered(tmp_path / MODEL, param_shapes=SHAPES)
    with pytest.raises(ConfigError, match="lacks zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        read(tmp_path)
    altered(tmp_path / MODEL, param_shapes=None, module=module | {"a.bias": torch.tensor(1.0).half()})
    with pytest.raises(ConfigError, match="a.bias only in F16"):
        read(tmp_path)


def state_of(folder: Path, rank: int, prefix: str = "", **changes) -> None:
    path = folder / f"{prefix}zero_pp_rank_{rank}_{OPTIMIZER}"
    altered(path, optimizer_state_dict=torch.load(path)["optimizer_state_dict"] | changes)


FAULTS = {
    "a partition count of none": (
        partitioned,
        lambda folder: [state_of(folder, rank, "bf16_", partition_count=[0, 0]) for rank in range(2)],
        "partitions of 0 ranks",
    ),
    "a count beyond any": (
        partitioned,
        lambda folder: [state_of(folder, rank, "bf16_", partition_count=1 << 20) for rank in range(2)],
        "partitions of 1048576 ranks",
    ),
    "experts": (
        partitioned,
        lambda folder: state_of(folder, 1, "bf16_", ds_zero_partition_groups=[]),
        "partitioned over groups of experts",
    ),
    "several types": (
        sharded,
        lambda folder: state_of(folder, 1, fp32_flat_groups=[torch.zeros(4), torch.zeros(4, dtype=torch.float64)]),
        "not flat, or of several types",
    ),
    "not flat": (
        sharded,
        lambda folder: state_of(folder, 1, fp32_flat_groups=[torch.zeros(4, 8).t()]),
        "not flat, or of several types",
    ),
    "a shorter partition": (
        sharded,
        lambda folder: state_of(folder, 1, fp32_flat_groups=[torch.zeros(16)]),
        r"its partitions hold \[17, 16\] elements, the weights need 17 of each",
    ),
    "a short partition": (
        sharded,
        lambda folder: state_of(folder, 1, fp32_flat_groups=[torch.zeros(15)]),
        r"IndexError: elements 10 .. 16 of 15",
    ),
    "a long partition": (
        sharded,
        lambda folder: state_of(folder, 0, fp32_flat_groups=[torch.zeros(18)]),
        r"its partitions hold \[18, 17\] elements, the weights need 17 of each",
    ),
    "a short piece": (
        lambda folder, world: mapped(folder, world, 1),
        lambda folder: None,
        r"c.weight \(4, 1, 3\) takes 48 bytes, not 40: it is damaged",
    ),
    "a short line": (
        partitioned,
        lambda folder: [
            state_of(folder, rank, "bf16_", single_partition_of_fp32_groups=[torch.zeros(8), torch.zeros(7)])
            for rank in range(2)
        ],
        "IndexError: elements 16 .. 18 of 16",
    ),
    "a weight of no kind": (
        sharded,
        lambda folder: altered(folder / f"zero_pp_rank_0_{MODEL}", module={"other": torch.ones(2)}),
        "other is in the network, and neither trained, frozen, tied nor a buffer",
    ),
    "a file of an older run": (
        partitioned,
        lambda folder: shutil.copy(folder / f"bf16_zero_pp_rank_1_{OPTIMIZER}", folder / f"zero_pp_rank_1_{OPTIMIZER}"),
        "of one rank: remove those",
    ),
    "slices": (
        partitioned,
        lambda folder: shutil.copy(folder / MODEL, folder / "mp_rank_01_model_states.pt"),
        "mp_rank_01_model_states.pt is of a tensor-parallel run",
    ),
    "more ranks": (
        sharded,
        lambda folder: shutil.copy(folder / f"zero_pp_rank_1_{OPTIMIZER}", folder / f"zero_pp_rank_2_{OPTIMIZER}"),
        f"holds files of 3 ranks, and was last written by 2: remove zero_pp_rank_2_{OPTIMIZER}",
    ),
    "fewer ranks": (
        sharded,
        lambda folder: (folder / f"zero_pp_rank_0_{OPTIMIZER}").unlink(),
        f"lacks zero_pp_rank_0_{OPTIMIZER}: 1 of 2 ranks are there",
    ),
    "fewer models": (
        sharded,
        lambda folder: (folder / f"zero_pp_rank_1_{MODEL}").unlink(),
        f"lacks zero_pp_rank_1_{MODEL}: 1 of 2 ranks are there",
    ),
    "no model": (
        partitioned,
        lambda folder: (folder / MODEL).unlink(),
        f"lacks {MODEL} .* it holds bf16_zero_pp_rank_0_{OPTIMIZER}",
    ),
    "no state": (
        partitioned,
        lambda folder: torch.save({"x": 1}, folder / f"bf16_zero_pp_rank_1_{OPTIMIZER}"),
        "holds no optimizer_state_dict",
    ),
    "a list": (partitioned, lambda folder: torch.save([1], folder / MODEL), "holds no module: DeepSpeed did not"),
    "no shapes": (
        partitioned,
        lambda folder: altered(folder / MODEL, param_shapes=3),
        "is no checkpoint of ZeRO 1 to 3",
    ),
    "a pipeline": (partitioned, lambda folder: altered(folder / MODEL, mp_world_size=2), "mp_world_size 2"),
    "a share of a frozen weight": (
        sharded,
        lambda folder: altered(folder / f"zero_pp_rank_1_{MODEL}", frozen_param_fragments={"frozen": torch.zeros(1)}),
        "IndexError: elements 0 .. 5 of 4",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_laid_out_so(tmp_path, name):
    """Oracle: the fault put in: it is named, and nothing is read wrongly."""
    lay, change, message = FAULTS[name]
    lay(tmp_path, 2)
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_a_parallel_size_of_one(tmp_path):
    """Oracle: the weights: DeepSpeed writes the size of other parallelisms also where there is none."""
    for size in (None, 0, 1):
        (folder := tmp_path / str(size)).mkdir()
        partitioned(folder, 2, mp_world_size=size)
        assert torch.equal(read(folder)[0]["a.weight"], weights()["a.weight"])


def test_which_tag(tmp_path):
    """Oracle: by hand: the folder itself, the tag that is named, that of `latest`, the only one; else a choice."""
    find = deepspeed_files.find_tag_folder
    assert find(tmp_path / "none") is None and find(tmp_path) is None and find(tmp_path, "first") is None
    for tag in ("first", "second"):
        (tmp_path / tag).mkdir()
        assert find(tmp_path) == (None if tag == "first" else tmp_path / "first")
        torch.save({}, tmp_path / tag / MODEL)
    (tmp_path / "other").mkdir()
    assert find(tmp_path / "first") == tmp_path / "first" and find(tmp_path, "second") == tmp_path / "second"
    with pytest.raises(ConfigError, match="several checkpoints and no file latest: choose --tag first | second"):
        find(tmp_path)
    with pytest.raises(ConfigError, match="--tag third: .* it holds first, second$"):
        find(tmp_path, "third")
    (tmp_path / "latest").write_text("second\n")
    assert find(tmp_path) == tmp_path / "second" and find(tmp_path, "first") == tmp_path / "first"
    (tmp_path / "latest").write_text("fourth")
    with pytest.raises(ConfigError, match="the file latest says fourth: .* it holds first, second$"):
        find(tmp_path)
