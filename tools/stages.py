"""The programs that train, by name.

A stage's own program has the name of its folder (`02-dataparallel`), a further one is
FOLDER/PROGRAM (`03-model-split/tensor-split`).
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Programs besides a stage's own, by the folder of their sources.
FURTHER = {"03-model-split/tensor": "03-model-split/tensor-split"}


def all_stages(root=ROOT):
    """All programs that train, in the order of the stages."""
    own = {path.relative_to(root).parts[0] for path in root.glob("[0-9][0-9]-*/**/main.cpp")}
    return sorted(own | {name for folder, name in FURTHER.items() if (root / folder).is_dir()})


def path_of(stage):
    """The path of a stage's program, below the build's folder."""
    return Path(stage) if "/" in stage else Path(stage) / stage


def label(stage):
    """The name that the program gives itself."""
    return path_of(stage).name
