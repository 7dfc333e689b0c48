"""One start, in a fresh interpreter: prints the seconds that importing takes, and those from `fit` to the first step.

`overhead.py` runs this file once per measurement, with the class's name; before the clock starts it imports only what
Python has.
"""

import gc
import importlib
import json
import sys
import time
from typing import Any

MODULES = {"Trainer": "lightning.pytorch", "Engine": "polyphase.engine"}
"""What a script imports the trainer from; the second imports the first, when it is asked for its class."""


def start(name: str) -> tuple[float, float]:
    started = time.perf_counter()
    trainer_class = getattr(importlib.import_module(MODULES[name]), name)
    import_s = time.perf_counter() - started

    from _contestants import CASES, MLP, QUIET, Clock, make_loader, settle

    class First(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.started = time.perf_counter()
            return self.loss(batch)

    settle()
    first, loader = First(CASES[0], Clock(1)), make_loader(1)
    trainer = trainer_class(accelerator="cpu", devices=1, limit_train_batches=1, **QUIET)
    gc.collect()
    started = time.perf_counter()
    trainer.fit(first, loader)
    return import_s, first.started - started


if __name__ == "__main__":
    print(json.dumps(start(sys.argv[1])))
