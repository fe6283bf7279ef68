"""Turns folders of encoders, exports and data into what somebody would send who wants his code to run."""

import json
import os
import pickle
from pathlib import Path

from safetensors.torch import load_file, save_file

CODE = "import os\nprint('evil', __file__)\nclass Evil:\n    pass\nEvilConfig = EvilModel = EvilTokenizer = Evil\n"
_CLASSES = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoImageProcessor", "AutoProcessor", "AutoFeatureExtractor")
# Names that a library, Python or a loader of ours might import or run beside the files it reads.
_NAMES = (
    "evil",
    "pipeline",
    "conftest",
    "sitecustomize",
    "__init__",
    "modeling",
    "tokenization",
    "torch",
    "numpy",
    "setup",
)
WAYS = (
    "code",
    "unknown kind",
    "tokenizer's class",
    "pickles",
    "pickles alone",
    "kernel",
    "quantized",
    "adapter",
    "cut",
    "half",
    "other sizes",
    "no object",
)


class _Evil:
    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


def plant_code(folder: Path) -> None:
    """Adds Python files, and pickles under the names that libraries look for."""
    for name in _NAMES:
        (folder / f"{name}.py").write_text(CODE)
    (folder / f"{folder.name}.py").write_text(CODE)  # as a script of `datasets` is called
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "vocab.pkl", "data.pkl"):
        (folder / name).write_bytes(pickle.dumps(_Evil()))


def plant(folder: Path, way: str) -> None:
    """Spoils the folder of an encoder in one of WAYS, beside `plant_code`."""
    plant_code(folder)
    auto_map = {"auto_map": {name: f"evil.Evil{name.removeprefix('Auto')}" for name in _CLASSES}}
    tokenizer = auto_map | {"auto_map": auto_map["auto_map"] | {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
    _change(folder, "config.json", **auto_map)
    _change(folder, "tokenizer_config.json", **tokenizer)
    _change(folder, "preprocessor_config.json", **auto_map, image_processor_type="Evil")
    weights = list(folder.glob("*.safetensors"))
    if way == "unknown kind":
        _change(folder, "config.json", model_type="evil", architectures=["EvilModel"])
    elif way == "tokenizer's class":
        _change(folder, "tokenizer_config.json", tokenizer_class="AutoModel")
        _change(folder, "config.json", tokenizer_class="EvilTokenizer")
    elif way in ("pickles", "pickles alone"):
        for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin", "model.ckpt"):
            (folder / name).write_bytes(pickle.dumps(_Evil()))
        for path in weights if way == "pickles alone" else ():
            path.unlink()
    elif way == "kernel":
        _change(folder, "config.json", attn_implementation="kernels-community/evil")
    elif way == "quantized":
        _change(folder, "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    elif way == "cut":
        weights[0].write_bytes(weights[0].read_bytes()[:-100])
    elif way == "half":
        state = load_file(weights[0])
        save_file({name: state[name] for name in sorted(state)[1::2]}, weights[0], {"format": "pt"})
    elif way == "other sizes":
        _change(
            folder, "config.json", hidden_size=1 << 28, latent_channels=1 << 20, text_config={"hidden_size": 1 << 28}
        )
    elif way == "no object":
        (folder / "config.json").write_text("[1, 2]")
    elif way == "adapter":
        adapter = {
            "peft_type": "LORA",
            "base_model_name_or_path": "evil/base",
            "auto_mapping": {"parent_library": "evil"},
        }
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "path": "../..", "type": "evil.Transformer"}]))


def _change(folder: Path, name: str, **entries: object) -> None:
    file = folder / name
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(before | entries))
