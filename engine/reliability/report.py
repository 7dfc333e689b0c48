"""The JSON report of a failed run: which rank failed, the position of each rank, and collectives that differ."""

import json
import os
import platform
import socket
import time
from typing import Any

import lightning
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ..foreign import open_new
from ..version import __version__
from .advice import what_to_do
from .flight_recorder import describe_differences, mismatches
from .lost_hosts import HOST_LOST

__all__ = ["Report"]


class Report:
    """The JSON report of a failed run; it is created and written without a collective.

    Args:
        folder: local path or fsspec URL, created if need be.
        failure: the record of the first failure: rank, kind, message and by whom.
        ranks: the known facts about each rank.
        resume_from: path of the newest checkpoint; None if there is none.
        details: type, message and traceback of the exception.
        run_id: the one in the manifests of the run's checkpoints.
    """

    def __init__(
        self,
        folder: str,
        failure: dict[str, Any],
        ranks: dict[int, dict[str, Any]],
        resume_from: str | None,
        details: dict[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        now = time.time()
        self._content: dict[str, Any] = {
            "first_failing_rank": None if failure["kind"] == HOST_LOST else failure["rank"],
            "kind": failure["kind"],
            "message": failure["message"],
            "what_to_do": what_to_do(failure),
            "exception": details or None,
            "resume_from": resume_from,
            "run": run_id,
            "collectives": describe_differences(_collectives(ranks)),
            "ranks": {str(rank): ranks[rank] for rank in sorted(ranks)},
            "written_by": {"rank": failure["by"], "host": socket.gethostname(), "pid": os.getpid()},
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
            "versions": {
                "polyphase": __version__,
                "torch": torch.__version__,
                "lightning": lightning.__version__,
                "python": platform.python_version(),
            },
        }
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-rank{failure['by']}-{os.getpid()}.json"
        self._folder, self._name = folder, name
        self.where = f"{folder}/{name}"
        """The path of the report; or the reason why it could not be written."""
        self.mismatches = mismatches(_collectives(ranks))
        """The sentences of `collectives` about different operations, sizes or types."""

    def add(self, failures: dict[int, dict[str, Any]]) -> None:
        """Writes the report again, with the messages and tracebacks of other ranks that failed as well."""
        ranks: dict[str, Any] = self._content["ranks"]
        for rank, failure in failures.items():
            ranks[str(rank)] = {**ranks.get(str(rank), {}), **failure}
        records = _collectives({int(rank): failure for rank, failure in ranks.items()})
        self._content["collectives"] = describe_differences(records)
        self.mismatches = mismatches(records)
        self.write()

    @property
    def what_to_do(self) -> str | None:
        """The remedy for the failure; None if it is not a common one."""
        return self._content["what_to_do"]

    @property
    def collectives(self) -> list[str]:
        """Sentences about the collectives in which the ranks differ."""
        return list(self._content["collectives"])

    def write(self) -> str:
        """Writes the report; returns `where`."""
        try:
            files, path = url_to_fs(self._folder)
            files.makedirs(path, exist_ok=True)
            fresh = f"{path}/{self._name}.part"
            is_local = isinstance(files, LocalFileSystem)
            with open_new(fresh) if is_local else files.open(fresh, "w") as stream:
                json.dump(self._content, stream, indent=2, default=str)
            files.mv(fresh, f"{path}/{self._name}")  # atomically, since this process may be killed meanwhile
        except Exception as error:  # a problem with the report must not hide the failure
            self.where = f"not written: {type(error).__name__}: {error}"
        return self.where


def _collectives(ranks: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any] | None]:
    return {rank: record.get("collectives") for rank, record in ranks.items()}
