"""Gathers the source of a class, with all that it uses of this package, into one file: for exports that run without
dstrain.
"""

import ast
import importlib
import inspect
from collections.abc import Mapping

_PACKAGE = "dstrain."


def gather_class_source(root: type, replacements: Mapping[str, str]) -> str:
    """Returns Python source that defines the class `root` without importing dstrain: import lines, then all classes,
    functions and constants of dstrain that the class uses, then the class itself.

    replacements  {name of a module of dstrain: source that is written in place of its definitions}.
    """
    gathered = _SourceGatherer(replacements)
    gathered.add_import_or_definition(root.__module__, root.__name__)
    return "\n\n".join(("\n".join(sorted(gathered.imports)), *gathered.definitions)) + "\n"


class _SourceGatherer:
    """Collects the lines of imports (`imports`) and the sources of definitions (`definitions`). Each definition comes
    after those that it uses.
    """

    def __init__(self, replaced: Mapping[str, str]) -> None:
        self.replaced = replaced
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self._owners: dict[str, str] = {}  # the modules of what was added, by its name
        self._modules: dict[str, tuple[str, dict[str, ast.stmt]]] = {}

    def add_import_or_definition(self, module: str, name: str) -> None:
        """Adds the import line or the definition of `name` in a module; before a definition, all that it uses. Adds
        nothing if the name was added before, or if the module does not define it (builtins, local variables).
        """
        source, statements = self._read_module(module)
        statement = statements.get(name)
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith(_PACKAGE):
            self._add_definition_or_replacement(str(statement.module), name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            entry = next(entry for entry in statement.names if name in (entry.asname, entry.name))
            alone = ast.Import([entry]) if isinstance(statement, ast.Import) else None
            self.imports.add(ast.unparse(alone or ast.ImportFrom(statement.module, [entry], 0)))
        elif statement is not None and self._mark_added_if_new(module, name):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id != name:
                    self.add_import_or_definition(module, node.id)
            self.definitions.append(_extract_statement_source(source, statement))

    def _add_definition_or_replacement(self, module: str, name: str) -> None:
        """Adds the definition of `name` from a module of dstrain, or, once, the source that replaces this module."""
        if module not in self.replaced:
            self.add_import_or_definition(module, name)
        elif self._mark_added_if_new(module, module):
            self.definitions.append(self.replaced[module])

    def _mark_added_if_new(self, module: str, name: str) -> bool:
        """Records `name` of this module as added, and returns whether it is new. Raises AssertionError if the same name
        of another module was added before.
        """
        if name not in self._owners:
            self._owners[name] = module
            return True
        assert self._owners[name] == module, f"{name} stands in {self._owners[name]} and in {module}: rename one"
        return False

    def _read_module(self, module: str) -> tuple[str, dict[str, ast.stmt]]:
        """Returns the source of a module, and its top-level statements by each name that they define or import."""
        if module not in self._modules:
            source = inspect.getsource(importlib.import_module(module))
            bound = {name: found for found in ast.parse(source).body for name in _list_bound_names(found)}
            self._modules[module] = source, bound
        return self._modules[module]


def _list_bound_names(statement: ast.stmt) -> list[str]:
    """Returns the names that a top-level statement defines: by import, class, def or assignment. [] for other
    statements.
    """
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [entry.asname or entry.name for entry in statement.names]
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _extract_statement_source(source: str, statement: ast.stmt) -> str:
    """Returns the lines of a statement, with those of its decorators, from the source of its module."""
    first = min([statement.lineno, *(line.lineno for line in getattr(statement, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : statement.end_lineno])
