"""Runs mypy on the three packages: by a link that gives the folders the names they are imported by."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "polyphase").symlink_to(ROOT)
        packages = [f"-ppolyphase.{name}" for name in ("engine", "callbacks", "models")]
        command = [sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}", *packages]
        return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
