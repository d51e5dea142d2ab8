"""Begin a project: a folder with two files that train, for you to change.

    python -m safetrain.new my_project

my_project/my_project.py has a Trainer subclass, a model and a data set, my_project/recipe/my_project.yaml says how they
are trained. Nothing that is there already is changed. Exit codes: 0 written, 1 it can't be written, 2 wrong use.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from safetrain.errors import ConfigError, UsageError
from safetrain.user_path import search_user_code_last

_CODE = '''"""What is trained; recipe/my_project.yaml says how.

    python -m safetrain recipe=my_project
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import safetrain


class MyProject(safetrain.Trainer):
    def training_step(self, batch):
        """The mean loss of a batch; or None, where this rank has nothing to add."""
        points, labels = batch
        return F.cross_entropy(self.model(points), labels)

    def validation_step(self, batch):
        """Log a value for each sample: the mean over all ranks is then exact."""
        points, labels = batch
        scores = self.model(points)
        self.log("loss", F.cross_entropy(scores, labels, reduction="none"))
        self.log("accuracy", (scores.argmax(dim=1) == labels).float())


def model(width):
    """Your model: any module."""
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


class Points(Dataset):
    """Your data: here, points of a square, and whether each is inside of a circle. Every rank must make the same."""

    def __init__(self, count, seed):
        self.points = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
        self.labels = (self.points.norm(dim=1) < 0.8).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]
'''

_RECIPE = """# @package _global_
# Is a point inside of the circle?
#   python -m safetrain recipe=my_project
# What is not said here is as in `python -m safetrain recipe=my_project --cfg job`.
trainer:
  # arguments of its __init__, if you give it one, are further keys here
  _target_: my_project.MyProject

model:
  _target_: my_project.model
  # units of the hidden layers
  width: 64

data:
  train:
    _target_: my_project.Points
    # samples
    count: 4096
    # where the random numbers start
    seed: 1
  val:
    _target_: my_project.Points
    # samples
    count: 1000
    # another one, or it would be the training data
    seed: 2

optimizer:
  # _partial_: the Trainer adds the parameters
  _target_: torch.optim.Adam
  _partial_: true
  # learning rate
  lr: 0.01

loop:
  # passes over the training data
  epochs: 5

loader:
  # samples per rank and step
  batch_size: 32

# what tells the best checkpoint, and what a sweep is about
metric: val/accuracy
"""


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    search_user_code_last()
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise UsageError("usage: python -m safetrain.new NAME, such as my_project; --help says what it writes")
        print(write(Path(arguments[0])))
    except (ConfigError, UsageError) as error:  # the first: of a recipe in the current folder
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{arguments[0]}: can't be written: {error}", file=sys.stderr)
        return 1
    return 0


def write(folder: Path) -> str:
    """Write the project; returns what there is to say about it.

    Raises:
        UsageError: ``folder`` exists, or its name can't be that of a module and a recipe.
        OSError: it can't be written.
    """
    name = folder.name
    if folder.exists():
        raise UsageError(f"{folder}: is there already, and stays as it is. Choose another name, or remove it first.")
    check_name(name)
    class_name = "".join(part.capitalize() for part in name.split("_"))
    code, recipe = folder / f"{name}.py", folder / "recipe" / f"{name}.yaml"
    recipe.parent.mkdir(parents=True)
    for path, text in ((code, _CODE), (recipe, _RECIPE)):
        path.write_text(text.replace("my_project", name).replace("MyProject", class_name), encoding="utf-8")
    width = len(str(recipe))
    return (
        f"{code!s:<{width}}  the Trainer, the model, the data\n{recipe}  how it is trained\n\n"
        f"Train it, on two processes or on every GPU there is:\n\n"
        f"  cd {folder} && python -m safetrain recipe={name}"
    )


def check_name(name: str) -> None:
    """Hold that ``name`` can be that of a module and of a recipe.

    Raises:
        UsageError: with a name that can.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        near = near if re.match("[a-z]", near) and not keyword.iskeyword(near) else f"my_{near or 'project'}"
        raise UsageError(
            f"{name}: must be a Python module's name: small letters, digits and _, a letter first, no word of Python's "
            f"own. Did you mean {near}?"
        )
    if name == "recipe" or importlib.util.find_spec(name) is not None:
        raise UsageError(f"{name}: there is another module of that name, which would be imported. Try my_{name}.")
    from safetrain.catalog import recipes

    if any(recipe.name == name and recipe.shipped for recipe in recipes()):
        raise UsageError(f"{name}: safetrain ships a recipe of that name, which would be run. Try my_{name}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
