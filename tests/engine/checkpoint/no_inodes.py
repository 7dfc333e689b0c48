"""Saves where there is room for the first checkpoint's files, and for no second one's. Usage: no_inodes.py FOLDER"""

import os
import sys
import warnings
from pathlib import Path

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError

from .sample_checkpoints import about, content, is_whole, save

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    saver = AsyncCheckpointer()
    save(folder / "1", 1, saver)
    left = sorted(os.listdir(folder))
    while True:
        try:
            (folder / f"filler{len(os.listdir(folder))}").touch()
        except OSError:
            break
    (folder / "filler1").unlink()  # for the directory, but for no file in it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver.save(content(2), str(folder / "2"), about=about(2), of_rank={})
        saver.finish()
    print([str(warning.message) for warning in caught])
    try:
        save(folder / "2", 2, saver)
    except (CheckpointError, OSError) as error:
        print(f"raised: {error}")
    print(f"left: {[name for name in sorted(os.listdir(folder)) if not name.startswith('filler')] == left}")
    print(f"whole: {is_whole(str(folder / '1'), 1)}")
