"""The architecture, read off the syntax trees of dstrain/ and launch/: who may import whom, and what a file may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment

FILES = {path.relative_to(ROOT).as_posix(): path for folder in ("dstrain", "launch")
         for path in sorted((ROOT / folder).rglob("*.py"))}

# Design section 4. A module, or a folder with all that is in it, and what of dstrain it may import beside itself.
# The longest name that fits counts. "systems" is the table of names in systems/__init__.py, which loads on demand.
BASE = ("config", "ranks", "draws")
RULES = {
    "config": (), "ranks": ("place",), "draws": (), "stops": (), "recipe": ("config",), "clock": ("config",),
    "folders": ("config", "recipe"), "hosts": ("config", "ranks", "recipe", "folders"), "options": ("config",),
    "nn": BASE, "diffusion": BASE, "encoders": (*BASE, "nn", "diffusion"),
    "systems": ("systems.base",), "systems.base": (),
    "engine": ("config", "ranks", "recipe", "__version__"),
    "data": ("config", "ranks", "draws"), "data.builtin.make_emoji_pairs": ("encoders",), "track": ("config", "ranks"),
    "card": ("config", "recipe", "engine.manifest", "__version__"),
    "scenes": ("config", "draws", "data.clips", "data.pixels", "sampling", "systems.base"),
    "written": ("config", "ranks", "scenes", "track"),
    "sampling": ("ranks", "systems.base"), "place": (),
    "weights": ("engine.checkpoint", "engine.manifest", "engine.store", "systems.base"),
    "runs": ("config", "ranks", "recipe", "engine.checkpoint", "engine.store", "systems.base", "weights"),
    "first_stage": ("config", "ranks", "recipe", "runs", "systems", "systems.base", "encoders", "weights"),
    "encode_plan": ("config", "ranks", "first_stage", "data", "encoders"),
    "ending": ("config", "ranks"),
    "cli": (*BASE, "recipe", "ending", "systems", "folders", "options", "data.sources", "engine.settings", "weights"),
}
A_SYSTEM = (*BASE, "nn", "diffusion", "encoders", "systems.base")
A_VERB = (*BASE, "recipe", "clock", "folders", "hosts", "stops", "sampling", "weights", "runs", "systems",
          "systems.base", "engine", "data", "track", "encoders", "card", "scenes", "written", "first_stage", "encode_plan",
          "place", "__version__")
VERBS = ("train", "generate", "evaluate", "encode", "embed", "consolidate", "export", "adopt", "plan", "bench")
A_SCRIPT = ("cli", "options", "ranks", "engine.engines", *VERBS)
A_BENCH = (*A_SCRIPT, "config", "data", "diffusion", "draws", "engine", "track", "systems", "systems.phenaki")

# Libraries with an owner; imported anywhere else they would be a second place for one fact, or slow down every start.
OWNERS = {
    "deepspeed": ("dstrain.engine",),
    "wandb": ("dstrain.track",),
    "matplotlib": ("dstrain.track",),
    "diffusers": ("dstrain.encoders", "dstrain.export", "dstrain.systems.*.to_diffusers", "dstrain.systems.vae.kl"),
    "transformers": ("dstrain.encoders",),
}

# What may be called while a module is imported: it makes a value and does no work.
VALUES = {"re.compile", "frozenset", "set", "dict", "tuple", "list", "dict.fromkeys", "Path", "TypeVar", "np.uint64",
          "Field", "field", "ConfigDict", "torch.device", "threading.local",
          "_class.add_implicit_resolver"}
DECORATORS = {"dataclass", "field_validator", "model_validator", "torch.no_grad", "torch.compiler.disable"}


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {name_of(path) for path in FILES}


def tree(path: str) -> ast.Module:
    return ast.parse(FILES[path].read_text(encoding="ascii"), path)


def imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of every import, also those within functions: modules where they are, else module.name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in MODULES or node.module == "dstrain" else node.module


def within(name: str, folder: str) -> bool:
    """Whether a dotted name is `folder` or lies in it; * stands for one word."""
    words, pattern = name.split("."), folder.split(".")
    return len(words) >= len(pattern) and all(p in ("*", w) for w, p in zip(words, pattern))


def allowed(module: str) -> tuple[str, ...]:
    """What of dstrain a module may import, itself and its folder included."""
    if module.startswith("launch."):
        return A_BENCH if module.startswith("launch.bench") else A_SCRIPT
    own = module.removeprefix("dstrain.")
    if own in VERBS:
        return (*A_VERB, own, "train") if own == "bench" else (*A_VERB, own)       # bench times train's own step
    if own == "dstrain":
        return ()
    if own.startswith("systems.") and own != "systems.base":
        return (*A_SYSTEM, ".".join(own.split(".")[:2]))
    rules = [rule for rule in RULES if within(own, rule)]
    assert rules, f"{module} has no rule: say in design section 4 and here what it may import"
    rule = max(rules, key=len)
    return RULES[rule] if rule == "systems" else (*RULES[rule], rule)


def refused(module: str, imported: str) -> bool:
    """Whether a module may not import what `imports` has found."""
    if imported == "dstrain":
        return not within(module, "dstrain.engine")                # the version, for the manifest
    if not imported.startswith("dstrain."):
        return False
    name = imported.removeprefix("dstrain.")
    return not any(name == rule if rule == "systems" else within(name, rule) for rule in allowed(module))


@pytest.mark.parametrize("path", FILES)
def test_imports_point_downwards(path):
    """Oracle: the table of design section 4, completed by the modules that came since."""
    wrong = [f"{path}:{line} imports {found}" for line, found in imports(tree(path)) if refused(name_of(path), found)]
    assert not wrong


@pytest.mark.parametrize("path", FILES)
def test_libraries_with_an_owner(path):
    """Oracle: the third invariant of design section 2: DeepSpeed stands in engine/ alone, and so on."""
    wrong = [f"{path}:{line} imports {found}" for line, found in imports(tree(path))
             for library, owners in OWNERS.items() if within(found, library)
             and not any(within(name_of(path), owner) for owner in owners)]
    assert not wrong


@pytest.mark.parametrize("module, imported", [
    ("dstrain.systems.dit.system", "dstrain.systems.iddpm"), ("dstrain.systems.dit", "dstrain.engine.ema"),
    ("dstrain.systems.dit.network", "dstrain.data.images"), ("dstrain.systems.dit", "dstrain.track.meter"),
    ("dstrain.systems.base", "dstrain.systems.dit"), ("dstrain.systems.dit", "dstrain.systems"),
    ("dstrain.engine.ema", "dstrain.systems.base"), ("dstrain.engine.ema", "dstrain.data.order"),
    ("dstrain.data.batches", "dstrain.systems"), ("dstrain.track.tracker", "dstrain.engine.engines"),
    ("dstrain.diffusion.flow", "dstrain.nn.layers"), ("dstrain.nn.layers", "dstrain.systems.base"),
    ("dstrain.config", "dstrain.recipe"), ("dstrain.ranks", "dstrain.config"), ("dstrain.sampling", "dstrain.train"),
    ("dstrain.train", "dstrain.generate"), ("dstrain.train", "dstrain.cli"), ("dstrain.train", "dstrain.systems.dit"),
    ("dstrain.cli", "dstrain.train"), ("launch.train", "dstrain.systems.base"), ("launch.train", "dstrain.data.images"),
])
def test_the_rules_refuse(module, imported):
    """Oracle: imports that the design forbids; without this the rules above might allow all."""
    assert refused(module, imported)


@pytest.mark.parametrize("path", FILES)
def test_a_file_fits(path):
    """Oracle: design sections 3 and 11: 330 lines, 120 columns, ASCII, a docstring that says what it is for."""
    content = FILES[path].read_bytes()
    assert content.isascii()
    lines = content.decode().splitlines()
    assert len(lines) <= 330
    assert [f"{path}:{number}" for number, line in enumerate(lines, 1) if len(line) > 120] == []
    assert ast.get_docstring(tree(path)), f"{path} has no docstring"


def at_import(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of all that runs while a module is imported, but for the making of values."""
    classes = {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    classes |= {alias.asname or alias.name for node in module.body if isinstance(node, ast.ImportFrom)
                for alias in node.names if (node.module or "").startswith("dstrain")}

    def calls(node: ast.AST | None, known: set[str]) -> Iterator[tuple[int, str]]:
        for call in ast.walk(node) if node is not None else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) not in known:
                yield call.lineno, ast.unparse(call.func)

    def body(statements: list[ast.stmt], known: set[str]) -> Iterator[tuple[int, str]]:
        for node in statements:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                for decorator in node.decorator_list:
                    yield from calls(decorator, known | DECORATORS)
                if isinstance(node, ast.ClassDef):
                    yield from body(node.body, known | classes)
                else:
                    for default in (*node.args.defaults, *node.args.kw_defaults):
                        yield from calls(default, known | classes)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                tables = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)
                          and isinstance(call.func, ast.Attribute) and call.func.attr in ("items", "values", "keys")
                          and isinstance(call.func.value, ast.Name)}
                yield from calls(node, known | tables)
            elif isinstance(node, ast.For):
                yield from body(node.body, known)
                yield from calls(node.iter, known)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                yield from calls(node, known)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
                continue
            elif not (isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass))
                      or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                yield node.lineno, type(node).__name__

    return body(module.body, VALUES)


@pytest.mark.parametrize("path", FILES)
def test_no_work_at_import(path):
    """Oracle: design section 4: what a module calls while it is imported only makes values."""
    assert [f"{path}:{line} {what}" for line, what in at_import(tree(path))] == []


@pytest.mark.parametrize("text", ["import torch\ntorch.manual_seed(0)", "import os\nHOME = os.environ.copy()",
                                  "try:\n    import x\nexcept ImportError:\n    x = None", "print('loading')",
                                  "def f(x=open('/etc/hosts')):\n    pass", "class A:\n    table = load()",
                                  "@register('dit')\nclass A:\n    pass", "if True:\n    pass"])
def test_work_at_import_is_seen(text):
    """Oracle: modules that do work; without this the test above might see none."""
    assert list(at_import(ast.parse(text)))


def test_imports_are_light():
    """Oracle: a fresh interpreter that imports every verb: no library with an owner is loaded, no thread runs."""
    verbs = [name for name in sorted(MODULES) if name.removeprefix("dstrain.") in (*VERBS, "cli")]
    program = f"""
import importlib, sys, threading
for name in {verbs}:
    importlib.import_module(name)
print([name for name in {sorted(OWNERS)} if name in sys.modules], threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), text=True, capture_output=True,
                          timeout=120)
    assert done.stdout.split() == ["[]", "1"], done.stdout + done.stderr[-3000:]
