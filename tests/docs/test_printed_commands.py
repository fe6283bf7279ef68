"""Every command that README, docs and --help print runs as printed, with tiny overrides appended.

A group is one working folder, in which its commands run in turn, as a reader would type them: what trains, trains for
two steps; the recipes of papers are tried by --dry-run. NOT_RUN says why each of the few others is not run.
"""

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel, T5Config, T5Model

from dstrain import systems
from dstrain.commands.job import load_and_check_recipe
from dstrain.data.builtin.emoji import Emoji
from tests.docs.test_docs import PAGES, SCRIPTS, command_words, find_code, read_page
from tests.support import clips, first_stage, foreign, towers
from tests.support.launch import ROOT, here, launch

TINY = "steps=2 every.report=1 every.save=2 every.sample=2 every.evaluate=2 every.evaluate_samples=4 every.metrics=0 "
TINY += "every.report_page=0 batch.global=4 optimizer.warmup=1 samples.num=2 samples.num_steps=2 data.workers=0 "
TINY += "track.wandb=disabled"
DIT = f"{TINY} optimizer.decay_steps=2 model.hidden_size=32 model.depth=1"
DEEPER = f"{TINY} optimizer.decay_steps=2 model.hidden_size=32 model.depth=4"
XL = "model.size=null model.patch_size=2 model.hidden_size=32 model.depth=1 model.num_heads=2"
UNET = f"{TINY} optimizer.decay_steps=2 model.attention_resolutions=[]"
DRAW, MEASURE = "--num-samples 2 --steps 2", "--num-samples 4"
ZERO1 = "--ds_config ds_configs/zero1.json"
PROFILES = f"{DIT} steps=12 ema.snapshots=1"
XL_RECIPE = "launch/recipes/dit-xl2-imagenet256.yaml"
PAPER = f"{TINY} {XL} model.num_classes=2 samples.labels=null --dry-run"
PIXELS = f"{TINY} model.num_channels=32 model.num_res_blocks=1 model.channel_mult=[1,1] model.attention_resolutions=[]"
OF_FASHION = "--metrics fd,accuracy --num-samples 8 --steps 2"
SD_EMA, SD_MSE = (f"--first-stage stabilityai/sd-vae-ft-{name}" for name in ("ema", "mse"))
DVAE = "model.discrete.num_tokens=32 model.discrete.codebook_dim=8 model.discrete.hidden_dim=8"
SMALL = "--image-size 32"
VIDEO = "optimizer.decay_steps=2 model.dim=32 model.spatial_depth=1"
README = f"{TINY} data.image_size=64 model.dim=32 model.spatial_depth=1 model.temporal_depth=1 model.codebook_size=64"
PRIOR = "model.depth=1 model.heads=2 model.dim_head=8 optimizer.warmup=1"
PAIRED = "data.path=PAIRS data.splits=[0.5,0.25,0.25] model.image_embed_dim=12 model.max_text_len=0 every.sample=0"

OTHERS = "a folder of DeepSpeed's own, which tests/commands/test_consolidate.py reads"
OWN_IMAGES = "tests/launch/test_own_images.py runs it as printed"
EXPORTS = (
    "it draws in another process, for seconds; tests/launch/test_own_images.py and tests/commands/test_export.py do"
)
CLIPS = "it compares with the 10,000 built-in clips, whose tokens take a minute; tests/launch/test_phenaki.py"
NOT_TRIED = "no tiny overrides are known to suit it yet"
AN_OPTION = "an option and no command"

# By group: printed command, and what is appended.
GROUPS = {
    "pictures": [
        ("train ema.profiles=[0.05,0.10] ema.snapshots=100", f"{DIT} steps=12 ema.snapshots=1"),
        ("generate runs/dit-small --num-samples 40 --guidance-scale 4", DRAW),
        ("generate runs/dit-small --num-samples 50000 --no-pngs --batch 64", DRAW),
        ("generate runs/dit-small --num-samples 50000 --no-pngs --batch 64 --out fid/", DRAW),
        ("generate runs/dit-small --num-samples 60", DRAW),
        ("evaluate runs/dit-small --num-samples 100 --steps 100", MEASURE),
        ("evaluate runs/dit-small --metrics fd,accuracy,pr --num-samples 2000", "--num-samples 8 --steps 2"),
        ("export runs/dit-small --out weights --format safetensors --ema 0.97", ""),
        ("train init_from=weights", f"{DIT} folder=runs/again --dry-run"),
        (
            "train name=adapted init_from=weights steps=100 model.lora.rank=8 model.lora.alpha=8 optimizer.lr=2e-3",
            DIT,
        ),
        ("export runs/adapted --out adapters --format peft", ""),
        ("export runs/adapted --out merged --format safetensors", ""),
        ("consolidate runs/dit-small --weights ema:0.97 --out weights", "--out consolidated"),
        ("consolidate runs/NAME --weights ema --out weights", "--out consolidated-too"),
        ("export runs/NAME --format safetensors --out DIR", ""),
        ("reconstruct runs/dit-small --ema 0.05,0.10,0.15", ""),
        ("generate runs/dit-small --ema 0.10", DRAW),
        ("generate runs/dit-small --ema 0.15", DRAW),
        ("reconstruct runs/dit-small --sweep", MEASURE),
        ("train steps=400 optimizer.decay_steps=400 ema.profiles=[0.05,0.10] ema.snapshots=40 name=prof", PROFILES),
        (
            "reconstruct runs/prof --sweep --metric fd --ema 0.03,0.05,0.10,0.15,0.20 --num-samples 200",
            "--num-samples 8 --ema 0.05,0.10",
        ),
        ("report runs/dit-small", ""),
        ("train --ds_config ds_configs/zero2.json", f"{DIT} folder=runs/dit-small-wide"),
        ("report runs/dit-small runs/dit-small-wide --out comparison.html", ""),
        ("watch runs", ""),
        ("generate RUN", DRAW),
        ("generate RUN --num-samples N --batch N", DRAW),
        ("evaluate RUN --num-samples N", MEASURE),
        ("generate RUN --size 320x192", f"{DRAW} --size 32x24"),
    ],
    "training": [
        ("train --dry-run", DIT),
        ("train --print-config model.depth=8", ""),
        ("train --profile 10:13", f"{DIT} steps=14 --dry-run"),
        ("train batch.global=256", f"{DIT} --dry-run"),
        ("train steps=2000", f"{DIT} --dry-run"),
        ("train steps=2000 optimizer.lr=1e-3", f"{DIT} --dry-run"),
        ("train steps=200 every.sample=50 folder=/tmp/try", f"{DIT} --dry-run"),
        ("train --ds_config zero2.json steps=20", f"{DIT} --dry-run"),
        ("train --recipe launch/recipes/NAME.yaml", f"{DIT} --dry-run"),
        (
            "train name=mine data.path=/data/images data.held_out=0.02 model.num_classes=12 data.channels=3",
            f"{DIT} data.held_out=0.1",
        ),
        ("train --recipe tests/newcomer/edm.yaml --ds_config ds_configs/zero3.json", f"{TINY} model.width=8"),
        ("train name=layersync model.align.kind=layersync model.align.depth=2 model.align.target=4", DEEPER),
        (
            "train name=repa model.align.kind=repa model.align.depth=2 model.align.path=encoders/dinov2-base",
            f"{DEEPER} model.align.hidden=8",
        ),
        (
            "plan --recipe dit-xl2-imagenet512 --world 8 --gpu h200 model.routing.ratio=0.5",
            f"{XL} model.depth=3",
        ),
        ("plan --world 8 --gpu 4090", "model.hidden_size=32 model.depth=1"),
        ("plan --recipe dit-xl2-imagenet256 --world 64 --gpu h200", XL),
    ],
    "unet": [
        ("train --recipe launch/recipes/iddpm-small.yaml", UNET),
        ("generate runs/iddpm-small --num-samples 60", DRAW),
        ("evaluate runs/iddpm-small --num-samples 100", f"{MEASURE} --steps 2"),
        ("train --recipe launch/recipes/iddpm-small-upsampler.yaml", UNET),
        ("generate runs/iddpm-small-14 --then runs/iddpm-small-upsampler", DRAW),
        ("generate RUN --then UPSAMPLER", DRAW),
        (
            "train --recipe launch/recipes/iddpm-imagenet64-hybrid.yaml data.path=/data/imagenet/train",
            f"{PIXELS} --dry-run",
        ),
    ],
    "latents": [
        ("train --recipe launch/recipes/vae-small.yaml", f"{TINY} optimizer.decay_steps=2"),
        ("export runs/vae-small --out runs/first_stage", ""),
        ("encode runs/vae-small --out latents/fashion", "--batch 200 --split held_out"),
        (
            "encode --first-stage runs/first_stage --data builtin:fashion --image-size 32 --no-flip --out runs/latents",
            "--batch 200 --split held_out",
        ),
        ("train --recipe launch/recipes/dit-small-latents.yaml", DIT),
        ("generate runs/dit-small-latents --num-samples 40", DRAW),
        (f"encode {SD_EMA} --data /data/imagenet/train --image-size 256 --out latents/imagenet256", ""),
        (
            f"encode {SD_MSE} --data /data/imagenet/train --image-size 256 --out latents/imagenet256",
            f"--out again {SMALL}",
        ),
        ("encode --first-stage VAE --data DATA --image-size 256 --out DIR --part 1/16", f"--part 1/1 {SMALL}"),
        (
            "encode --first-stage runs/first_stage --data /data/images --image-size 256 --out latents",
            f"--out others {SMALL}",
        ),
        ("train --recipe dit-b4-imagenet256 --ds_config zero1 data.path=latents/imagenet256", PAPER),
        (
            "train --recipe dit-b4-imagenet256 --ds_config zero3.json data.path=latents/imagenet256 batch.global=256",
            PAPER,
        ),
        (f"train --recipe {XL_RECIPE} {ZERO1}", PAPER),
        (f"train --recipe {XL_RECIPE} {ZERO1} data.path=latents/imagenet256", PAPER),
        (f"import DiT-XL-2-256x256.pt --recipe {XL_RECIPE} --out runs/published", XL),
        (
            "import DiT-XL-2-256x256.pt --recipe dit-xl2-imagenet256 --out runs/published",
            f"{XL} --out runs/published-too",
        ),
        ("generate runs/published --labels 207,360,387 --num-samples 3", "--steps 2 --guidance-scale 1"),
        ("generate runs/published --labels 207,360 --num-samples 8", DRAW),
        (f"convert latents features {SD_MSE} --out latents/imagenet256", "--out taken"),
        (f"convert latents FOLDER {SD_MSE} --out DIR", "--out taken-too"),
    ],
    "videos": [
        ("train --recipe launch/recipes/phenaki-tokenizer-small.yaml", f"{TINY} {VIDEO}"),
        ("encode runs/phenaki-tokenizer-small --out tokens/moving", "--data data/clips"),
        (
            "encode runs/phenaki-tokenizer-small --split held_out --out tokens/moving-unseen",
            "--data data/clips --held-out 0.5",
        ),
        ("export runs/phenaki-tokenizer-small --format safetensors --out tokenizers/moving", ""),
        (
            "train --recipe launch/recipes/phenaki-small.yaml",
            f"{TINY} optimizer.decay_steps=2 model.dim=32 model.depth=1",
        ),
        ("generate runs/phenaki-small --prompts texts.txt --num-samples 8", DRAW),
        ("generate runs/phenaki-small --scenes story.txt --num-samples 2", DRAW),
        ("generate runs/phenaki-small --scenes story.txt --num-samples 2 --seed 1 --format gif", DRAW),
        ("generate runs/phenaki-small --scenes story.txt --num-samples 4", DRAW),
        ("generate RUN --scenes FILE --prime-frames K", f"{DRAW} --prime-frames 3"),
        ("generate RUN --prime PATH", f"{DRAW} --prompts texts.txt"),
        ("train --recipe launch/recipes/phenaki-tokenizer-readme.yaml data.path=/data/clips", README),
        (
            "encode runs/phenaki-tokenizer-readme --text-encoder google/t5-v1_1-base --out tokens",
            "--out tokens/readme --max-text-len 8",
        ),
        ("export runs/phenaki-tokenizer-readme --format safetensors --out tokenizers/phenaki-readme", ""),
        (
            "train --recipe launch/recipes/phenaki-readme.yaml data.path=tokens",
            f"{TINY} data.path=tokens/readme data.image_size=64 model.token_shape=[9,2,2] model.dim=32 model.depth=1 "
            "model.codebook_size=64 model.text_encodings_dim=12 model.max_text_len=8 --dry-run",
        ),
    ],
    "texts": [
        ("train --recipe launch/recipes/prior-small.yaml", f"{TINY} {PRIOR} every.sample=0"),
        ("train --recipe launch/recipes/decoder-small.yaml", DIT),
        (
            "generate runs/prior-small --prompts texts.txt --text-encoder MINILM --num-samples 16 "
            "--then runs/decoder-small",
            DRAW,
        ),
        ("generate runs/prior-small --prompts texts.txt --then runs/decoder-small", DRAW),
        ("train --recipe launch/recipes/t2i-small.yaml", DIT),
        ("generate runs/t2i-small --prompts texts.txt --negative-prompt dark", DRAW),
        ("train --recipe launch/recipes/t2v-small.yaml", DIT),
        ("generate runs/t2v-small --prompts texts.txt", DRAW),
        ("generate runs/prior-small --prompts FILE --text-encoder PATH", DRAW),
        ("generate runs/prior-small --prompts names.txt --num-samples 382 --then runs/decoder-small --out drawn", DRAW),
        ("evaluate --images drawn --metrics retrieval", ""),
        ("encode --image-encoder CLIP --text-encoder CLIP --data FOLDER --out PAIRS", ""),
        ("encode --image-encoder CLIP --text-encoder CLIP --text-encodings --data FOLDER --out PAIRS", "--out PAIRS2"),
        ("encode --image-encoder CLIP --text-encoder CLIP --text-encodings --data IMAGES --out PAIRS", "--out PAIRS3"),
        ("train --recipe launch/recipes/prior-laion.yaml data.path=PAIRS", f"{TINY} {PRIOR} {PAIRED} --dry-run"),
        (
            "train --recipe launch/recipes/prior-1b.yaml --ds_config ds_configs/zero3.json",
            f"{TINY} {PRIOR} {PAIRED} --dry-run",
        ),
    ],
    "data": [
        ("index /data/imagenet/train", ""),
        ("index /data/clips data.num_frames=17 --check --json", ""),
        ("index /data/clips data.num_frames=17 data.captions=clips.csv --check --json", "data.captions=data/clips.csv"),
        ("index CLIPS data.num_frames=17 data.buckets=[5,9,17]", ""),
        ("pack /data/imagenet/train --out /fast/imagenet", ""),
        ("pack /data/cc3m --captions --format tar --shard-bytes 1G --out /fast/cc3m", ""),
        ("convert cifar10 cifar-10-batches-py --out cifar10-shards", ""),
        ("convert KIND PATH --out SHARDS", ""),
    ],
}
SD3_ADAPTERS = "tests/systems/dit/test_adapters.py exports such a run"
LEFT_OUT = "tests/data/test_left_out.py, tests/metrics/test_in_training.py"
NOT_RUN = {
    "evaluate runs/t2i-left --metrics fd,accuracy --num-samples 1000": LEFT_OUT,
    "consolidate other/checkpoints --tag global_step1000 --trust-pickle --dtype bfloat16 --out weights": OTHERS,
    "consolidate other/checkpoints --trust-pickle --out weights": OTHERS,
    "convert imagenet-kit /data/imagenet/val --out /data/imagenet/val.csv": "tests/data/formats/test_imagenet.py",
    "encode --first-stage sd-vae-ft-mse --data photos --image-size 256 --out latents": OWN_IMAGES,
    "train --recipe dit-own-images samples.reference=photos samples.features=[inception:pt_inception.pth]": OWN_IMAGES,
    "evaluate runs/dit-own-images --metrics fid,kid --features inception:pt_inception.pth": OWN_IMAGES,
    "export runs/dit-own-images --out pipeline": OWN_IMAGES,
    "export runs/dit-small --out clothes": EXPORTS,
    "reconstruct runs/dit-small --sweep --metric fd --num-samples 1000": "as of runs/prof, which is swept by fd",
    "export runs/dit-small-latents --out pipeline": EXPORTS,
    "export runs/iddpm-small --out unet": EXPORTS,
    "export runs/adapted --out adapted": EXPORTS,
    "evaluate runs/phenaki-small --metrics fd,accuracy --num-samples 500": CLIPS,
    "evaluate runs/phenaki-small --metrics scenes --num-samples 100": CLIPS,
    "encode --data": AN_OPTION,
    "evaluate --reference": AN_OPTION,
    "evaluate --write-reference": AN_OPTION,
    "encode --image-encoder": AN_OPTION,
    "evaluate --metrics": AN_OPTION,
    "export --format safetensors": AN_OPTION,
    "export --format peft": AN_OPTION,
    "export --format diffusers-lora": AN_OPTION,
    "export runs/sd3-lora --out adapters --format diffusers-lora": SD3_ADAPTERS,
    "reconstruct --sweep --num-samples N": AN_OPTION,
    "keep --min-hosts N": AN_OPTION,
    "keep --min-hosts 2": "tests/commands/test_keep.py",
    "report --out": AN_OPTION,
    (
        "plan --recipe phenaki --ds_config ds_configs/zero3.json --world 8 --gpu h100 batch.global=8 batch.micro=1 "
        "model.token_shape=[17,64,64] model.tokenizer=null model.text_encoder=null model.critic=null "
        "model.critic_depth=null samples.sampler=null samples.prompts=null model.recompute=none parallel.sequence=8"
    ): "a minute; tests/planning/test_sharing.py",
    "generate runs/prior-laion --prompts texts.txt --then runs/decoder --then runs/upsampler": "two of them run",
    "import FILE": "tests/systems/prior reads lucidrains' files",
    "plan --recipe prior-1b model.text_encoder=null --world 64 --search": "a minute; tests/launch/test_plan.py",
    "evaluate RUN --metrics fid,kid --features inception:pt_inception.pth --write-reference OUT.npz": NOT_TRIED,
    "evaluate RUN --metrics fid,kid,is,pr --features inception:pt_inception.pth --reference REFERENCE": NOT_TRIED,
    "evaluate RUN --metrics fid,kid,pr,is --features inception:FILE --reference REFERENCE": NOT_TRIED,
    (
        "evaluate runs/dit-xl2 --metrics fid,kid,pr,is --features inception:pt_inception.pth --reference "
        "VIRTUAL_imagenet256_labeled.npz --guidance-scale 1.5"
    ): NOT_TRIED,
    "evaluate --images A --against B --metrics fid,pr --features inception:pt_inception.pth": NOT_TRIED,
    "train --recipe launch/recipes/dvae-small.yaml": NOT_TRIED,
    "train --recipe launch/recipes/dvae-dalle-pytorch.yaml data.path=/data/images": NOT_TRIED,
    "import vae.pt --recipe launch/recipes/dvae-dalle-pytorch.yaml --out RUN": NOT_TRIED,
    "import vae.pt --recipe dvae-dalle-pytorch --out runs/dvae": NOT_TRIED,
    "encode runs/dvae --data /data/images --out tokens": NOT_TRIED,
    "encode RUN --data FOLDER --out TOKENS": NOT_TRIED,
    (
        "train --recipe launch/recipes/dit-xl2-imagenet256.yaml name=decoder model.num_classes=1 "
        "model.embedding_dim=768 data.path=IMAGES data.embeddings=PAIRS data.labels=none samples.labels=null"
    ): NOT_TRIED,
    "keep --max-restarts 20": "tests/launch/test_keep.py",
}


def printed_commands() -> set[str]:
    """Returns the commands of all pages that have something behind the verb, without launcher and folder of a clone."""
    found = set()
    for page in PAGES:
        for line in find_code(read_page(page)):
            for verb, words in command_words(line):
                whole = words and "..." not in words and "[" not in line.replace("=[", "") and "`)" not in line
                if whole and (verb not in SCRIPTS or verb == "convert"):
                    found.add(shlex.join([verb, *words]).replace("'", ""))
    return found


def test_every_command_is_in_a_group():
    """Oracle: the pages."""
    known = [command for group in GROUPS.values() for command, _ in group] + list(NOT_RUN)
    assert len(known) == len(set(known)) and set(known) == printed_commands()


# What stands for a reader's own files, by group; words of a command are looked up in it.
OWN = {
    "pictures": {"RUN": "runs/dit-small", "runs/NAME": "runs/dit-small", "N": "2", "A": "data/grey", "B": "data/grey"}
    | dict.fromkeys(("inception:pt_inception.pth", "inception:FILE"), "builtin")
    | {"runs/dit-xl2": "runs/dit-small", "REFERENCE": "OUT.npz", "VIRTUAL_imagenet256_labeled.npz": "OUT.npz"},
    "training": {"launch/recipes/NAME.yaml": "launch/recipes/dit-small.yaml"},
    "unet": {"RUN": "runs/iddpm-small-14", "UPSAMPLER": "runs/iddpm-small-upsampler"},
    "latents": {"RUN": "runs/dvae", "VAE": "stabilityai/sd-vae-ft-ema", "DATA": "data/images", "FOLDER": "features"},
    "videos": {"RUN": "runs/phenaki-small", "FILE": "story.txt", "K": "3", "PATH": "clip.gif"},
    "texts": {"CLIP": "clip", "FOLDER": "data/captioned", "IMAGES": "data/captioned", "MINILM": "minilm"}
    | {"FILE": "texts.txt", "PATH": "minilm"},
    "data": {"CLIPS": "data/clips", "KIND": "cifar10", "PATH": "cifar-10-batches-py", "SHARDS": "shards"},
}


def write_images(folder: Path, classes: int, each: int, side: int = 40, mode: str = "RGB") -> None:
    draw = np.random.default_rng(0)
    for number in range(classes * each):
        path = folder / f"class{number % classes:02d}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (side, side) if mode == "L" else (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels, mode).save(path)


def prepare_pictures(place: Path) -> None:
    write_images(place / "data/grey", 10, 2, 28, "L")


def prepare_training(place: Path) -> None:
    write_images(place / "data/images", 12, 3)
    towers.dinov2(place / "encoders/dinov2-base")


def prepare_unet(place: Path) -> None:
    write_images(place / "data/imagenet/train", 2, 3, 64)
    train(
        *f"--recipe launch/recipes/iddpm-small.yaml {UNET} name=iddpm-small-14".split(),
        "data.image_size=14",
        "model.channel_mult=[1,2]",
    )


def prepare_latents(place: Path) -> None:
    write_images(place / "data/imagenet/train", 2, 3, 256)
    write_images(place / "data/images", 2, 3, 128)
    for name in ("ema", "mse"):
        path = place / f"stabilityai/sd-vae-ft-{name}"
        first_stage.save(path, channels=3, depth=4, latent_channels=4, scaling_factor=0.18215)
    for kind, values in (
        ("features", np.random.default_rng(0).standard_normal((1, 4, 32, 32), np.float32)),
        ("labels", np.array([1])),
    ):
        (place / f"features/imagenet256_{kind}").mkdir(parents=True)
        for number in range(3):
            np.save(place / f"features/imagenet256_{kind}" / f"{number}.npy", values)
    for name, recipe, tiny in (
        ("DiT-XL-2-256x256.pt", "dit-xl2-imagenet256", f"{XL} model.first_stage.path=stabilityai/sd-vae-ft-ema"),
        ("vae.pt", "dvae-dalle-pytorch", DVAE),
    ):
        run = load_and_check_recipe(place / f"launch/recipes/{recipe}.yaml", tiny.split())
        (network,) = systems.build(run.system, run.model).networks().values()
        torch.save(network.state_dict(), place / name)


def prepare_videos(place: Path) -> None:
    (place / "data/clips").mkdir(parents=True)
    for number in range(6):
        frames = clips.moving(17, 64, 64, number)
        clips.write(place / f"data/clips/{number}.mp4", frames, "mpeg4")
        (place / f"data/clips/{number}.txt").write_text("a red cat on the moon\n")
    (place / "texts.txt").write_text("a bag moving up\n")
    (place / "story.txt").write_text("a bag moving up\na bag moving down\n")
    clips.write_pictures(place / "clip.gif", clips.moving(9, 32, 32))
    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=12, d_kv=6, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    T5Model(config).save_pretrained(place / "google/t5-v1_1-base")
    towers._tokenizer().save_pretrained(place / "google/t5-v1_1-base")


def prepare_texts(place: Path) -> None:
    for name in ("minilm", "sentence-transformers/all-MiniLM-L6-v2"):
        sizes = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        BertModel(BertConfig(vocab_size=20, max_position_embeddings=10, **sizes)).save_pretrained(place / name)
        towers._tokenizer().save_pretrained(place / name)
    sizes = {"channels": 3, "depth": 4, "latent_channels": 4, "scaling_factor": 0.18215}
    first_stage.save(place / "stabilityai/sd-vae-ft-ema", **sizes)
    towers.clip(place / "clip")
    towers.preprocessing(place / "clip")
    names = list(Emoji(split="held_out").list_captions())[:2]
    for name in ("texts.txt", "names.txt"):
        (place / name).write_text("".join(f"{text}\n" for text in names))
    (place / "data/captioned").mkdir(parents=True)
    for number in range(40):
        Image.fromarray(np.full((256, 256, 3), number, np.uint8)).save(place / f"data/captioned/{number}.png")
        (place / f"data/captioned/{number}.txt").write_text("a red cat\n")


def prepare_data(place: Path) -> None:
    write_images(place / "data/imagenet/train", 2, 3)
    prepare_videos(place)
    (place / "data/clips.csv").write_text("file,caption\n" + "".join(f"{n}.mp4,a cat\n" for n in range(6)))
    (place / "data/cc3m").mkdir()
    for number in range(3):
        Image.fromarray(np.full((40, 40, 3), number, np.uint8)).save(place / f"data/cc3m/{number}.jpg")
        (place / f"data/cc3m/{number}.txt").write_text("a cat\n")
    foreign.cifar(place / "cifar-10-batches-py", False, np.random.default_rng(0))


def train(*words: str) -> None:
    path = os.pathsep.join((str(ROOT / "tests/newcomer"), str(ROOT)))
    launch("launch/train.py", *words, num=1, PYTHONPATH=path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder like a clone."""
    for name in ("launch", "ds_configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_printed_commands(place, monkeypatch, capsys, group):
    """Oracle: exit code 0, and no traceback."""
    globals()[f"prepare_{group}"](place)
    for printed, appended in GROUPS[group]:
        whole = f"{printed} {appended}".replace("/data/", "data/").replace("/fast/", "fast/")
        verb, *words = (OWN[group].get(word, word) for word in shlex.split(whole))
        if verb == "train" and not {"--dry-run", "--print-config"} & set(words):
            train(*words)
            continue
        code, stdout, stderr = here(f"{verb}.py", words, monkeypatch, capsys)
        assert code == 0 and "Traceback" not in stdout + stderr, f"{printed}: {stdout[-3000:]}{stderr[-3000:]}"
