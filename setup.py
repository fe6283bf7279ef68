"""Builds a wheel with recipes, converters and DeepSpeed JSONs of a clone in dstrain/shipped/. See pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {"launch/recipes": "*.yaml", "launch/convert": "*.py", "ds_configs": "*.json"}


class BuildWithShipped(build_py):
    """Copies what is shipped beside the modules; an editable install finds it in the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder, pattern in SHIPPED.items():
            target = Path(self.build_lib, "dstrain", "shipped", Path(folder).name)
            self.mkpath(str(target))
            for path in sorted(Path(folder).glob(pattern)):
                self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithShipped})
