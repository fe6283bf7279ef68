#!/usr/bin/env bash
# Collects, into .whl/ of this checkout, what dstrain needs on a machine that reaches no package registry and has
# Python 3.12, torch, torchvision, transformers, einops and PyYAML already. docs/guides/gpu.md says how they are used there.
#
#   bash launch/bench/pack_wheels.sh [PACKAGE ...]       in an environment where dstrain is installed; more packages by name
#
# Versions are those of this environment. deepspeed has no wheel, and is built here without its compiled operators.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .whl
git check-ignore -q .whl || echo /.whl/ >> "$(git rev-parse --git-path info/exclude)"
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${name}_x86_64")
done
pinned() { python -c "import importlib.metadata as m, sys; print(*(f'{n}=={m.version(n)}' for n in sys.argv[1:]))" "$@"; }
DS_BUILD_OPS=0 python -m pip wheel -q --no-deps "$(pinned deepspeed)" -w .whl
# Each once: pip refuses two versions of a package. Compiled ones are fetched for that machine's Python, not for ours.
for package in $(pinned pydantic pydantic-core diffusers) annotated-types typing-inspection hjson importlib_metadata zipp \
    $(pinned plotly) narwhals "$@"; do
  python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    -d .whl "$package"
done
du -sh .whl
