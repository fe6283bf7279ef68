"""What the options of `dstrain encode` name, opened."""

from dataclasses import dataclass
from typing import Any

from dstrain.data.source import Source
from dstrain.encoders.text import TextEncoder
from dstrain.runs.first_stage import FirstStage


@dataclass(frozen=True)
class Plan:
    """What the options name, opened."""

    stage: FirstStage
    texts: TextEncoder | None  # None: captions are not encoded
    source: Source
    encoding: dict[str, Any]  # JSON, see data/cached/shards.py
