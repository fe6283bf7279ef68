"""Do the unit tests notice a changed program? Changes one place at a time, and runs the tests of that module.

    python -m tests.mutation --sample 60 diffusion rng order            # 60 mutants of these groups, drawn by --seed 0
    python -m tests.mutation --files dstrain/engine/ema/shadow.py --sample 0   # every mutant of one file
    python -m tests.mutation --try dstrain/rng.py "(numel + 1) // 2" "numel // 2"         # one change of your own
    python -m tests.mutation --mistakes                # each of MISTAKES, and the one test that is to notice it

A mutant is killed if a test fails or runs for longer than its limit of CPU time. Survivors are printed with their
place; exit code 1 where fewer than --least of 100 died. Mutants that change nothing that a caller can see are named in
mutation.txt, each with the reason, and are not drawn. Mutants that cannot be imported are not counted.

No file is written: a process that has loaded the libraries is forked for each mutant, and its import of the module
compiles the changed syntax tree. So tests that start fresh processes do not see the change; slow tests are left out.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PHENAKI = "dstrain/systems/phenaki"
PUBLISHED, ALIGN = "tests/systems/dit/test_published.py", "tests/systems/dit/test_align.py"
TEXTS, PIXART = "tests/systems/dit/test_texts.py", "tests/systems/dit/test_pixart.py"
SD3 = "tests/systems/dit/test_sd3.py"
# What a group mutates, and the tests of each file; of several entries that fit a path, the longest counts.
GROUPS = {
    "diffusion": ["dstrain/diffusion/"],
    "rng": ["dstrain/rng.py"],
    "order": ["dstrain/data/order.py"],
    "recipe": ["dstrain/recipe/"],
    "engine": ["dstrain/engine/"],
    "schedules": ["dstrain/systems/vae/schedules.py", f"{PHENAKI}/masking.py", f"{PHENAKI}/decoding.py"],
}
TESTS = {
    "dstrain/diffusion/": ["tests/diffusion", "--deselect=tests/diffusion/test_observed.py"],
    "dstrain/rng.py": ["tests/test_rng.py"],
    "dstrain/data/order.py": ["tests/data/test_order.py"],
    "dstrain/data/decode/clips.py": ["tests/data/decode/test_clips.py"],
    "dstrain/recipe/": ["tests/recipe"],
    "dstrain/systems/dit/": [PUBLISHED, ALIGN],
    "dstrain/systems/": ["tests/systems/test_contract.py"],
    "dstrain/systems/vae/schedules.py": ["tests/systems/vae/test_schedules.py"],
    f"{PHENAKI}/masking.py": ["tests/systems/phenaki/test_masking.py"],
    f"{PHENAKI}/decoding.py": ["tests/systems/phenaki/test_decoding.py"],
    "dstrain/engine/": ["tests/engine"],
    "dstrain/engine/__init__.py": ["tests/engine/test_start.py"],
    "dstrain/engine/start.py": ["tests/engine/test_start.py"],
    "dstrain/engine/planning/activations.py": ["tests/engine/planning/test_activations.py"],
    "dstrain/engine/initial.py": [
        "tests/engine/test_allocation.py",
        "tests/engine/test_start_memory.py",
        "tests/engine/test_engines.py",
        "tests/engine/test_initial.py",
    ],
    "dstrain/engine/blocks.py": [
        "tests/engine/test_blocks.py",
        "tests/engine/test_engine_rules.py",
        "tests/systems/iddpm/test_network.py",
    ],
    "dstrain/engine/optimizers.py": [
        "tests/engine/test_optimizer_rules.py",
        "tests/engine/test_optimizers.py",
        "tests/engine/test_masters.py",
    ],
    "dstrain/engine/updates.py": [
        "tests/engine/test_masters.py",
        "tests/engine/test_nonfinite.py",
        "tests/engine/test_accumulation.py",
        "tests/engine/test_step_counts.py",
        "tests/engine/test_engines.py",
    ],
    "dstrain/engine/checkpoint.py": [
        "tests/engine/test_checkpoint.py",
        "tests/checkpoint/test_checkpoint_files.py",
        "tests/engine/test_elastic.py",
        "tests/engine/test_optimizers.py",
    ],
    "dstrain/checkpoint/validate.py": ["tests/checkpoint/test_validate.py"],
    "dstrain/checkpoint/fragment_index.py": ["tests/checkpoint/test_fragment_index.py", "tests/engine/test_elastic.py"],
    "dstrain/checkpoint/fragments.py": [
        "tests/checkpoint/test_fragment_index.py",
        "tests/engine/test_elastic.py",
        "tests/checkpoint/test_index.py",
        "tests/checkpoint/test_fragments.py",
    ],
    "dstrain/checkpoint/store.py": ["tests/checkpoint/test_store.py"],
    "dstrain/engine/recovery.py": [
        "tests/engine/test_recovery.py",
        "tests/engine/test_checkpoint.py",
        "tests/engine/test_nonfinite.py",
        "tests/engine/test_masters.py",
        "tests/checkpoint/test_checkpoint_files.py",
    ],
    "dstrain/engine/engines.py": [
        "tests/engine/test_masters.py",
        "tests/engine/test_engine_rules.py",
        "tests/engine/test_initial.py",
        "tests/engine/test_engines.py",
        "tests/engine/test_start_memory.py",
    ],
    "dstrain/engine/masters.py": [
        "tests/engine/test_masters.py",
        "tests/engine/test_engine_rules.py",
        "tests/engine/test_engines.py",
        "tests/engine/test_elastic.py",
    ],
    "dstrain/engine/ema/shadow.py": ["tests/engine/ema/test_shadow.py"],
    "dstrain/engine/ema/snapshots.py": ["tests/engine/ema/test_snapshots.py"],
    "dstrain/engine/ema/combine.py": ["tests/engine/ema/test_combine.py", "tests/checkpoint/test_validate.py"],
    "dstrain/engine/ema/profiles.py": ["tests/engine/ema/test_profiles.py", "tests/engine/ema/test_combine.py"],
    "dstrain/engine/planning/memory_kinds.py": ["tests/planning/test_costs.py"],
    "dstrain/engine/planning/fake_ranks.py": [
        "tests/engine/planning/test_fake_ranks.py",
        "tests/planning/test_costs.py",
    ],
    "dstrain/engine/parser.py": ["tests/engine/test_settings.py"],
    "dstrain/engine/schema.py": ["tests/engine/test_settings.py"],
    "dstrain/engine/settings.py": ["tests/engine/test_settings.py", "tests/engine/test_settings_borders.py"],
    "dstrain/checkpoint/safetensors_io.py": [
        "tests/checkpoint/test_index.py",
        "tests/checkpoint/test_torch_files.py",
        "tests/checkpoint/test_fragments.py",
        "tests/commands/test_consolidate.py",
    ],
    "dstrain/checkpoint/torch_files.py": ["tests/checkpoint/test_torch_files.py", "tests/commands/test_consolidate.py"],
    "dstrain/checkpoint/deepspeed_files.py": [
        "tests/checkpoint/test_deepspeed_layouts.py",
        "tests/commands/test_consolidate.py",
        "tests/checkpoint/test_deepspeed_files.py",
    ],
    "dstrain/checkpoint/layout.py": [
        "tests/checkpoint/test_index.py",
        "tests/checkpoint/test_fragments.py",
        "tests/commands/test_consolidate.py",
    ],
    "dstrain/checkpoint/saver.py": ["tests/checkpoint/test_saver.py"],
    "dstrain/checkpoint/manifest.py": ["tests/checkpoint/test_store.py"],
}
# What is easily got wrong about transformers: what, the file, the change, and the test that notices it.
MISTAKES = [
    (
        "alpha forgotten when adapters are merged",
        "dstrain/nn/lora.py",
        "merged[base] + lora.output_factor * update",
        "merged[base] + update",
        "tests/nn/test_lora.py::test_merged_is_unmerged[dit]",
    ),
    (
        "reversed time of published weights",
        "dstrain/systems/dit/layouts.py",
        "    if layout.from_noise:",
        "    if not layout.from_noise:",
        f"{PUBLISHED}::test_golden_networks[sit_network]",
    ),
    (
        "reversed time of samples",
        "dstrain/diffusion/flow.py",
        "self.integrate_ode(network, x, grid",
        "self.integrate_ode(lambda x, t: network(x, 1 - t), x, grid",
        f"{PUBLISHED}::test_golden_trajectories[repa_trajectory]",
    ),
    (
        "three guided channels for all",
        "dstrain/diffusion/samplers.py",
        "count = channels or x_t.shape[1]",
        "count = 3",
        f"{PUBLISHED}::test_golden_trajectories[rae_trajectory]",
    ),
    (
        "all channels guided for three",
        "dstrain/diffusion/samplers.py",
        "count = channels or x_t.shape[1]",
        "count = x_t.shape[1]",
        f"{PUBLISHED}::test_golden_trajectories[sit_trajectory]",
    ),
    (
        "rows and columns of rotations swapped",
        "dstrain/nn/positions.py",
        "np.concatenate(parts, axis=-1)",
        "np.concatenate(parts[::-1], axis=-1)",
        f"{PUBLISHED}::test_golden_networks[jit]",
    ),
    (
        "halves of w12 swapped",
        "dstrain/nn/tokens.py",
        "gate, values = self.w12(x)",
        "values, gate = self.w12(x)",
        f"{PUBLISHED}::test_golden_networks[lightningdit_network]",
    ),
    (
        "rotated condition tokens",
        "dstrain/nn/positions.py",
        "np.pad(angles, ((0, after), (0, 0)))",
        'np.pad(angles, ((0, after), (0, 0)), mode="edge")',
        f"{PUBLISHED}::test_golden_networks[raev2_label]",
    ),
    (
        "online weights of a file for its average",
        "dstrain/runs/weights.py",
        '("ema_model", "ema", "model_ema1", "model", "weights", ',
        '("model", "ema_model", "ema", "model_ema1", "weights", ',
        "tests/runs/test_weights.py::test_a_file_of_dits_train_py",
    ),
    (
        "online weights of a run for its average",
        "dstrain/runs/trained.py",
        "if part in system.averaged and not raw else",
        "if part in system.averaged and raw else",
        "tests/test_notebook.py::test_choices",
    ),
    (
        "online weights shown for the average",
        "dstrain/engine/ema/shadow.py",
        "use_flat_tensors_as_weights(shadows[chosen])",
        "showing(self._masters[part].flats)",
        "tests/engine/ema/test_shadow.py::test_reset_and_what_is_shown",
    ),
    (
        "LayerSync draws the deeper block, too",
        "dstrain/systems/dit/network.py",
        "tapped[self.align_target].detach()",
        "tapped[self.align_target]",
        f"{ALIGN}::test_layersync",
    ),
    (
        "an alignment that ends a step late",
        "dstrain/systems/dit/align.py",
        "step < self.section.until",
        "step <= self.section.until",
        f"{ALIGN}::test_until",
    ),
    (
        "smoothed pixels for REPA's encoder",
        "dstrain/systems/dit/align.py",
        "smooth=False",
        "smooth=True",
        f"{ALIGN}::test_features_are_those_of_transformers",
    ),
    (
        "registers read as patches",
        "dstrain/encoders/image.py",
        '1 + getattr(config, "num_register_tokens", 0)',
        "1",
        f"{ALIGN}::test_features_are_those_of_transformers",
    ),
    (
        "rotations of routed tokens by their order",
        "dstrain/systems/dit/trunk.py",
        "rotation[0, :, keep].transpose(0, 1)",
        "rotation[0, :, : keep.shape[1]].expand(len(keep), -1, -1, -1)",
        f"{ALIGN}::test_routed_tokens_keep_their_places",
    ),
    (
        "a mask of texts upside down",
        "dstrain/systems/dit/network.py",
        "self.text_tokens(text, mask)",
        "self.text_tokens(text, None if mask is None else ~mask.bool())",
        f"{PUBLISHED}::test_golden_networks[raev2_text]",
    ),
    (
        "texts never dropped",
        "dstrain/systems/dit/conditions.py",
        'return self._replace_empty_texts({"text": arguments["text"], "mask": torch.zeros_like(arguments["mask"])})',
        "return {}",
        f"{TEXTS}::test_texts_are_dropped_by_key",
    ),
    (
        "the null text beside every text",
        "dstrain/systems/dit/conditions.py",
        "~read.any(1, keepdim=True)",
        "torch.ones_like(read[:, :1])",
        f"{TEXTS}::test_padding_changes_nothing",
    ),
    (
        "padding of texts read",
        "dstrain/systems/dit/trunk.py",
        "_crop_attention_mask_to_tokens(mask, x, keep) if number > self.joins else None",
        "None",
        f"{TEXTS}::test_padding_changes_nothing",
    ),
    (
        "negative prompts unread",
        "dstrain/systems/dit/conditions.py",
        "if not inputs:",
        "if inputs or not inputs:",
        f"{TEXTS}::test_guidance_leads_away_from_a_negative_prompt",
    ),
    (
        "the head's table without the time",
        "dstrain/systems/dit/network.py",
        "self.final_layer(x, c, c[:, None])",
        "self.final_layer(x, c, 0 * c[:, None])",
        f"{PIXART}::test_golden_network[folder]",
    ),
    (
        "keys and values of texts swapped",
        "dstrain/systems/dit/layouts.py",
        r'attn2\.to_k\.(\w+)", ("to_k", "to_v")',
        r'attn2\.to_v\.(\w+)", ("to_v", "to_k")',
        f"{PIXART}::test_golden_network[file]",
    ),
    (
        "PixArt's ratio of sides upside down",
        "dstrain/systems/dit/conditions.py",
        "size[:, 4:5] / size[:, 5:6]",
        "size[:, 5:6] / size[:, 4:5]",
        "tests/systems/dit/test_pixart_sizes.py::test_network_told_sizes[1-folder]",
    ),
    (
        "scale and shift of SD3's last layers swapped",
        "dstrain/systems/dit/layouts.py",
        "    _swap_scale_and_shift(translated, layout, depth)",
        "    pass",
        f"{SD3}::test_golden_network[folder]",
    ),
    (
        "a mask upside down",
        "dstrain/systems/dit/network.py",
        "reorder_like_gathered_slices(read, patches, 1)",
        "reorder_like_gathered_slices(~read, patches, 1)",
        f"{SD3}::test_masked_words_are_not_read",
    ),
    (
        "a text dropped without its pooled vector",
        "dstrain/systems/dit/conditions.py",
        "self.width] * mask[:, :1]",
        "self.width] * 1",
        f"{SD3}::test_a_text_is_dropped_with_its_pooled_vector",
    ),
    (
        "hashed words pooled with their padding",
        "dstrain/systems/dit/conditions.py",
        "(self.words(text) * read).sum(1)",
        "self.words(text).sum(1)",
        f"{TEXTS}::test_hashed_words_are_pooled",
    ),
    (
        "the encoders' empty text without its pooled vector",
        "dstrain/systems/dit/conditions.py",
        'torch.where(read[..., None], text, empty["text"].to(text.dtype))',
        'torch.cat((text[:, :1], torch.where(read[..., None], text, empty["text"].to(text.dtype))[:, 1:]), 1)',
        f"{SD3}::test_a_text_is_dropped_with_its_pooled_vector",
    ),
    (
        "states of the CLIPs after their last layer",
        "dstrain/encoders/joined_text.py",
        "out.hidden_states[-2]",
        "out.hidden_states[-1]",
        "tests/encoders/test_joined_text.py::test_rows_are_the_pipelines[True]",
    ),
    (
        "positions from the corner of SD3's square",
        "dstrain/nn/positions.py",
        "(whole - count) // 2 + np.arange(count)",
        "np.arange(count)",
        f"{SD3}::test_dual_blocks[folder]",
    ),
    (
        "the second attention of dual blocks from other tokens",
        "dstrain/systems/dit/blocks.py",
        "self.attn2(modulate(normed, shift, scale))",
        "self.attn2(modulate(self.image.norm1(image), shift, scale))",
        f"{SD3}::test_dual_blocks[folder]",
    ),
    (
        "the null text from its unmapped state",
        "dstrain/systems/dit/system.py",
        "weights.project_text_states_by_weights(states, values)",
        "weights.project_text_states_by_weights(0 * states, values)",
        f"{PIXART}::test_null_text_is_the_encoders_empty_text",
    ),
    (
        "an empty text of the encoder with its padding",
        "dstrain/systems/dit/conditions.py",
        'torch.where(read, mask, empty["mask"])',
        'torch.where(read, mask, torch.ones_like(empty["mask"]))',
        f"{PIXART}::test_what_is_dropped_reads_the_encoders_empty_text",
    ),
    (
        "an export with keys and values of texts swapped",
        "dstrain/systems/dit/layouts.py",
        "for letter, part in zip(letters, parts, strict=True):",
        "for letter, part in zip(letters[::-1], parts, strict=True):",
        f"{PIXART}::test_stock_pipeline_draws_from_an_export[0.1]",
    ),
    (
        "routing at evaluation",
        "dstrain/systems/dit/system.py",
        "if training and self.config.routing:",
        "if self.config.routing:",
        f"{ALIGN}::test_held_out_losses_are_those_of_the_flow",
    ),
]
PYTEST = [
    "-o",
    "addopts=--import-mode=importlib",
    "-p",
    "xdist",
    "-p",
    "no:cacheprovider",
    "--assert=plain",
    "-xq",
    "-m",
    "not slow",
]
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SYMMETRIC = {"min", "max", "np.minimum", "np.maximum", "np.outer"}  # whose arguments are not exchanged


class Mutant(NamedTuple):
    path: str  # from the root
    line: int
    change: str  # scope: old -> new, in words that a moved line does not alter
    where: int | ast.Module  # its number among the spots of the file, or the changed file


def changes_of(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""

    def with_(**fields: Any) -> ast.AST:
        twin = copy.copy(node)
        for name, value in fields.items():
            setattr(twin, name, value)
        return twin

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield with_(op=SWAPS[type(op)]())
        case ast.Compare(ops=[op, *rest]):
            yield with_(ops=[SWAPS[type(op)](), *rest])
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
            if node.value:  # -1 instead of 0 is the same dimension of a vector
                yield ast.Constant(node.value - 1)
        case ast.Constant(value=float()):
            yield ast.Constant(2 * node.value if node.value else 1.0)
        case ast.If() | ast.While() | ast.IfExp():
            yield with_(test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield with_(value=ast.Constant(None))
        case ast.Call(args=[first, second, *rest]) if not (
            isinstance(first, ast.Starred) or ast.unparse(node.func) in SYMMETRIC
        ):
            yield with_(args=[second, first, *rest])
        case ast.Slice(lower=lower, upper=upper):
            for name, bound in (("lower", lower), ("upper", upper)):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield with_(**{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
    if (
        isinstance(node, (ast.Raise, ast.Continue, ast.Break, ast.AugAssign))
        or (isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield)))
        or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple)))
    ):
        yield ast.Pass()


def places(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST, str, int | None]]:
    """(scope, parent, field, index) of what may be changed: not texts, messages, or annotations but for their calls."""
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if name in ("annotation", "returns", "decorator_list"):
                for call in (inner for inner in ast.walk(child) if isinstance(inner, ast.Call)):
                    yield from places(call, scope)
                continue
            yield scope, node, name, index
            if not isinstance(child, ast.Raise):
                inner = getattr(child, "name", None) if hasattr(child, "body") else None
                yield from places(child, f"{scope}.{inner}".lstrip(".") if isinstance(inner, str) else scope)


def spots(module: ast.Module) -> Iterator[tuple[str, ast.AST, str, int | None, ast.AST, ast.AST]]:
    """(scope, parent, field, index, old, new) of every change, in one order."""
    for scope, parent, field, index in places(module):
        old = getattr(parent, field) if index is None else getattr(parent, field)[index]
        yield from ((scope, parent, field, index, old, new) for new in changes_of(old))


def mutants_of(path: str) -> Iterator[Mutant]:
    for number, (scope, *_, old, new) in enumerate(spots(ast.parse((ROOT / path).read_text()))):
        yield Mutant(path, getattr(old, "lineno", 0), f"{scope or 'module'}: {brief(old)} -> {brief(new)}", number)


def tree_of(mutant: Mutant) -> ast.Module:
    if isinstance(mutant.where, ast.Module):
        return mutant.where
    module = ast.parse((ROOT / mutant.path).read_text())
    _, parent, field, index, _, new = next(itertools.islice(spots(module), mutant.where, None))
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new
    return ast.fix_missing_locations(module)


def own_mutant(path: str, old: str, new: str) -> Mutant:
    text = (ROOT / path).read_text()
    assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times"
    return Mutant(path, text[: text.index(old)].count("\n") + 1, f"{old} -> {new}", ast.parse(text.replace(old, new)))


def brief(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


class Loader(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Loads one module from a changed tree, and all others as ever."""

    def __init__(self, mutant: Mutant):
        self.mutant, self.module = mutant, mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(self.module, str(ROOT / mutant.path))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.module else None

    def get_code(self, name: str) -> Any:
        return compile(tree_of(self.mutant), self.path, "exec")


def tests_of(path: str) -> list[str]:
    return TESTS[max((name for name in TESTS if path.startswith(name)), key=len)]


def run(mutant: Mutant | None, tests: list[str], seconds: int) -> tuple[str, float]:
    """'killed', 'survived' or 'stillborn' (does not import), and the CPU seconds. None is the program as it is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        quiet = os.open(os.environ.get("MUTATION_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        code = 9
        with contextlib.suppress(BaseException):
            if mutant:
                sys.meta_path.insert(0, loader := Loader(mutant))
                importlib.import_module(loader.module)
            import pytest

            code = 1
            code = pytest.main([*PYTEST, *tests])
        os._exit(int(code))
    deadline = time.monotonic() + 5 * seconds  # the limit of CPU time ends loops, this ends what waits for ever
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = ended[1] if ended[0] else os.waitpid(pid, 0)[1]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(status)
    verdict = {0: "survived", 9: "stillborn"}.get(code, "killed")
    return verdict, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def load() -> None:
    """Imports what tests need and what no mutant changes."""
    os.environ.update(
        OMP_NUM_THREADS="1", HYPOTHESIS_STORAGE_DIRECTORY=tempfile.mkdtemp(), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
    )
    os.chdir(ROOT)
    for name in (
        "torch",
        "torchvision",
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.runtime.zero.stage3",
        "diffusers",
        "transformers",
        "pydantic",
        "yaml",
        "av",
        "pytest",
        "xdist.plugin",
    ):
        importlib.import_module(name)
    import hypothesis

    phases = [phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")]
    hypothesis.settings.register_profile("mutation", database=None, derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutation")
    gc.collect()
    gc.freeze()  # a fork's garbage collection would write to it all


def read_excused() -> set[tuple[str, str]]:
    """Path and change of the mutants in mutation.txt. A change may hold the sign that parts it from the reason."""
    _, *lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    parts = (line.rpartition(" | ")[0].partition(" | ") for line in lines if line)
    return {(path, change) for path, _, change in parts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; none is all")
    parser.add_argument("--files", nargs="*", default=[], help="files or folders beside those of the groups")
    parser.add_argument("--sample", type=int, default=200, help="mutants to draw; 0 is all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=90, help="percent that must die")
    parser.add_argument(
        "--try",
        nargs=3,
        dest="own",
        action="append",
        metavar=("FILE", "OLD", "NEW"),
        help="a change of your own; may be repeated",
    )
    parser.add_argument("--mistakes", action="store_true", help="each of MISTAKES, by the test that it names")
    options = parser.parse_args()
    excused = read_excused()
    mutants, named = [own_mutant(*words) for words in options.own or ()], {}
    for what, path, old, new, test in MISTAKES if options.mistakes else ():
        mutants.append(mutant := own_mutant(path, old, new)._replace(change=what))
        named[mutant.change] = [test]
    if not mutants:
        groups = options.groups or ([] if options.files else GROUPS)
        names = [name for group in groups for name in GROUPS[group]] + options.files
        paths = [
            path.relative_to(ROOT).as_posix()
            for name in names
            for path in (sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name])
        ]
        mutants = [
            mutant for path in paths for mutant in mutants_of(path) if (mutant.path, mutant.change) not in excused
        ]
        random.Random(options.seed).shuffle(mutants)
    load()
    limit, counts, survivors = {}, {"killed": 0, "survived": 0, "stillborn": 0}, []
    for mutant in mutants:
        if options.sample and counts["killed"] + counts["survived"] == options.sample:
            break
        tests = named.get(mutant.change) or tests_of(mutant.path)
        if (name := " ".join(tests)) not in limit:
            verdict, took = run(None, tests, 3600)
            assert verdict == "survived", f"the tests fail without a change: pytest {name}"
            limit[name] = int(30 + 4 * took)
            print(f"{took:5.1f} s of CPU: {name}", flush=True)
        verdict, took = run(mutant, tests, limit[name])
        counts[verdict] += 1
        line = f"{verdict:9} {took:5.1f} s  {mutant.path}:{mutant.line}  {mutant.change}"
        survivors += [line] if verdict == "survived" else []
        print(line, flush=True)
    share = 100 * counts["killed"] / max(counts["killed"] + counts["survived"], 1)
    print(*survivors, f"{counts} of {len(mutants)}: {share:.1f} % killed", sep="\n")
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
