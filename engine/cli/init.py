"""`polyphase init DIR`: creates a small example project that runs without changes."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from .runs import exit_with

__all__ = ["FILES", "main"]

FILES = ("README.md", "my_data.py", "my_model.py", "run.yaml", "test_project.py", "train.py")
"""Names of the files to write; the folder `project` has each of them with the extension ``.txt``."""

HELP = """\
usage: polyphase init DIR

Writes a small project to start from into the folder DIR, which may exist but may have none of the files:

  my_model.py        a LightningModule
  my_data.py         its data: handwritten digits that ship with scikit-learn, nothing to download
                     (without scikit-learn, points made up by a random generator)
  run.yaml           how it is run: polyphase fit --config run.yaml
  train.py           the same from Python
  test_project.py    runs both under two strategies: python -m pytest (pip install pytest)
  README.md          these commands
"""


def main(words: Sequence[str]) -> int:
    """Runs ``polyphase init`` with its arguments; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if len(words) > 1 or words[0].startswith("-"):
        exit_with(f"init takes the name of one folder, but got {' '.join(words)}. See polyphase init --help.")
    folder = Path(words[0])
    existing = [name for name in FILES if os.path.lexists(folder / name)]
    if existing:
        exit_with(f"init: {folder} has {', '.join(existing)} already, and nothing is overwritten. Name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            text = files(__package__).joinpath("project", f"{name}.txt").read_text(encoding="utf-8")
            with open(folder / name, "x", encoding="utf-8") as file:  # "x" never replaces a file created meanwhile
                file.write(text)
    except OSError as error:
        exit_with(f"init: can't write to {folder}: {error}.")
    where = f"cd {folder}\n" if os.path.abspath(folder) != os.getcwd() else ""
    run = "polyphase fit --config run.yaml --strategy ddp --devices 2 --accelerator cpu"
    print(f"wrote {', '.join(FILES)}\n\n{where}{run}")
    return 0
