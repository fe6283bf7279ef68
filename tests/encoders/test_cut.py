"""Texts that are longer than a model reads: how much of them is cut is counted and said."""

import re

import pytest
import torch

from dstrain import systems
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.encoders.reader import hash_words
from dstrain.encoders.text import TextEncoder
from dstrain.recipe import Run
from tests.support import checkpoints, tokenizers, towers
from tests.systems.phenaki.cases import TOKEN_CLIPS
from tests.systems.prior.cases import PAIRS

WORDS = (
    "a red cat",
    "the green dog on the blue moon",
    "",
    "the red house on the moon on the blue house on the moon",
    "cat",
)


def read_figures(line: str) -> list[int]:
    """Texts that are cut, texts, read of a text, the longest, and what is left out in all."""
    return [int(number) for number in re.findall(r"\d+", line.partition(":")[2])]


def test_an_encoder(tmp_path):
    """Oracle: words and two marks a text, of which BERT reads 10 and CLIP 8; a text without what is left out has the
    same encodings, and one word less changes them."""
    for make, longest in ((towers.sentences, 10), (towers.clip, 8)):
        make(tmp_path)
        lengths = [2 + len(text.split()) for text in WORDS]
        cut = [length - longest for length in lengths if length > longest]
        encoder = TextEncoder(str(tmp_path))
        found = read_figures(encoder.describe_cut([*WORDS], "captions"))
        assert found == [len(cut), len(WORDS), longest, max(lengths), sum(cut)]
        assert encoder.describe_cut([text for text in WORDS if len(text.split()) + 2 <= longest], "captions") == ""
    kept = [" ".join(WORDS[3].split()[:count]) for count in (12, 8 - 2, 8 - 3)]
    whole, same, other = encoder.encode(kept)["text_encodings"]
    assert torch.equal(whole, same) and not torch.equal(same, other)


@pytest.mark.parametrize(
    "name, model, figures, unit",
    [
        ("phenaki", TOKEN_CLIPS, [2, 5, 4, 13, 12], "words"),  # 3 and 9 words are left out
        ("phenaki", TOKEN_CLIPS | {"text_encodings_dim": 12, "max_text_len": 6}, [2, 5, 6, 15, 12], "tokens"),
        ("prior", PAIRS | {"max_text_len": 6}, [2, 5, 6, 15, 12], "tokens"),
        ("prior", PAIRS | {"max_text_len": 0}, [1, 5, 10, 15, 5], "tokens"),  # the pooled text is of what BERT reads
    ],
)
def test_a_system(tmp_path, name, model, figures, unit):
    """Oracle: the words of each text, counted by hand, with two marks where an encoder reads them."""
    towers.sentences(tmp_path)
    encoder = {} if unit == "words" else {"text_encoder": str(tmp_path)}
    system = systems.build(name, {**model, **encoder})
    line = system.describe_cut([*WORDS], "--prompts")
    assert read_figures(line) == figures and line.startswith("--prompts: ") and unit in line
    if unit == "words":
        some = hash_words([WORDS[3], " ".join(WORDS[3].split()[:4]), " ".join(WORDS[3].split()[:3])], 50, 4)
        assert torch.equal(some[0], some[1]) and not torch.equal(some[1], some[2])


def test_dstrain_generate_says_so(tmp_path, capsys):
    """Oracle: of two prompts the words beyond the four that the model reads; nothing is said where it reads all."""
    model = TOKEN_CLIPS | {"tokenizer": {"path": str(tokenizers.save(tmp_path / "tokenizer"))}}
    run = Run.model_validate({"system": "phenaki", "model": model, "ema": {"decays": []}})
    folder = checkpoints.write(tmp_path / "run", run, systems.build("phenaki", model).networks())
    for texts, line in ((("a red cat", WORDS[3]), "--prompts: 1 of 2 are cut: 4 words"), (("a red cat",), "")):
        options = GenerateOptions(folder, num=2, prompts=texts, num_steps=1, out=tmp_path / str(len(texts)), pngs=False)
        generate_samples(options)
        said = [said for said in capsys.readouterr().out.splitlines() if "are cut" in said]
        assert [text.startswith(line) for text in said] == [True] * bool(line)
