# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Replacing a saved model by another without a moment in which neither can be loaded."""

import os
import re
from pathlib import Path


def move_checkpoint(staging: Path, directory: Path, variant: str | None = None) -> None:
    """
    Moves a written checkpoint over an older one, such that one single move, that of the weights or of their index,
    puts the new one in the place of the old one.
    """
    tag = f".{variant}" if variant else ""
    index = f"model.safetensors.index{tag}.json"
    weights = re.compile(rf"model{re.escape(tag)}(-.*)?\.safetensors|{re.escape(index)}")
    old = {path.name for path in directory.iterdir() if weights.fullmatch(path.name)}
    shards = {path.name for path in staging.iterdir() if weights.fullmatch(path.name)} - {index}
    if (staging / index).exists() and shards & old:
        # Shards that replace older ones of the same names would do so one by one.
        content = (staging / index).read_text()
        for shard in shards:
            name = re.sub(r"(?=-\d{5}-of-\d{5})", staging.name.replace(".saving", ""), shard)
            os.rename(staging / shard, staging / name)
            content = content.replace(shard, name)
        (staging / index).write_text(content)
    written = sorted((path.name for path in staging.iterdir()), key=lambda name: (name == index, name))
    for name in written:
        os.replace(staging / name, directory / name)
    if shards:
        for name in old.difference(written):
            (directory / name).unlink()


__all__ = ["move_checkpoint"]
