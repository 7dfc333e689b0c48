"""Right and wrong calls, for a type checker: it is to report each line marked ``wrong:``, and no other.

What stands behind the mark is a part of the message. Nothing here is ever run.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import polyphase
import polyphase.engine
from polyphase import Engine, fit
from polyphase.callbacks import Snapshot, ThroughputMonitor
from polyphase.engine.flags import Layout
from polyphase.models import Digits, DigitsClassifier

module = DigitsClassifier()
data = Digits()
loader: DataLoader[int] = DataLoader([0, 1])  # type: ignore[arg-type]
any_flags: dict[str, Any] = {"devices": 2}
stoppers = [EarlyStopping("loss")]

# --- names
Engine()
Engine(strategy="ddp", devices=2)
Engine(stratgy="ddp")  # wrong: stratgy
Engine("ddp")  # wrong: positional
Engine(max_epoch=3)  # wrong: max_epoch
Engine(**any_flags)
Trainer(compression="bf16")  # wrong: compression

# --- types
Engine(max_epochs=3, max_steps=100, min_epochs=None, min_steps=1)
Engine(max_epochs="three")  # wrong: max_epochs
Engine(max_steps=None)  # wrong: max_steps
Engine(devices="auto")
Engine(devices=-1)
Engine(devices="0,1")
Engine(devices=[0, 1])
Engine(devices=["0"])  # wrong: devices
Engine(devices=None)  # wrong: devices
Engine(num_nodes="2")  # wrong: num_nodes
Engine(accelerator="cpu")
Engine(accelerator=CPUAccelerator())
Engine(accelerator=3)  # wrong: accelerator
Engine(max_time="00:01:00:00", val_check_interval=timedelta(minutes=1))
Engine(max_time={"hours": 1}, val_check_interval=0.5)
Engine(max_time=3600)  # wrong: max_time
Engine(limit_train_batches=0.1, limit_val_batches=2, overfit_batches=1)
Engine(limit_train_batches="10%")  # wrong: limit_train_batches
Engine(logger=False)
Engine(logger=CSVLogger("."))
Engine(logger=[CSVLogger(".")])
Engine(logger="csv")  # wrong: logger
Engine(callbacks=ThroughputMonitor())
Engine(callbacks=[ThroughputMonitor(), EarlyStopping("loss")])
Engine(callbacks=stoppers)
Engine(callbacks="x")  # wrong: callbacks
Engine(callbacks=[CSVLogger(".")])  # wrong: callbacks
Engine(plugins=MixedPrecision("16-mixed", "cpu"), profiler=SimpleProfiler())
Engine(plugins="x")  # wrong: plugins
Engine(default_root_dir=Path(), resume=Path("x"))
Engine(resume=[0])  # wrong: resume
Engine(hang_timeout_s=None)
Engine(hang_timeout_s="long")  # wrong: hang_timeout_s
Engine(global_batch_size=256, micro_batch_size="auto")
Engine(global_batch_size="256")  # wrong: global_batch_size
Engine(micro_batch_size="aut")  # wrong: micro_batch_size

# --- closed sets
Engine(strategy="hsdp:replicate=2", compression="powersgd:4")
Engine(strategy="deepspeed_stage_2")
Engine(strategy=DDPStrategy())
Engine(strategy=2)  # wrong: strategy
Engine(compression=None)  # wrong: compression
Engine(precision="bf16-mixed")
Engine(precision=16)
Engine(precision="64")
Engine(precision="bf16-mixd")  # wrong: precision
Engine(precision=8)  # wrong: precision
Engine(compile=True)
Engine(compile="reduce-overhead")
Engine(compile="fast")  # wrong: compile
Engine(uneven="drop", nonfinite="skip")
Engine(uneven="padd")  # wrong: uneven
Engine(nonfinite=None)  # wrong: nonfinite
Engine(gradient_clip_val=1.0, gradient_clip_algorithm="value")
Engine(gradient_clip_algorithm="nrom")  # wrong: gradient_clip_algorithm
Engine(deterministic="warn", profiler="simple")
Engine(deterministic="wran")  # wrong: deterministic
Engine(profiler="simpel")  # wrong: profiler

# --- fit
assert_type(fit(module, data, strategy="fsdp", devices=2, precision="bf16-mixed"), Engine)
assert_type(polyphase.fit(module, loader), polyphase.engine.Engine)
fit(module=module, data=data, max_epochs=1)
fit(module, data, **any_flags)
fit(module, data, stratgy="ddp")  # wrong: stratgy
fit(module, data, max_epochs="three")  # wrong: max_epochs
fit(module, data, precision="bf16-mixd")  # wrong: precision
fit(module)  # wrong: data
fit(module, data, data)  # wrong: positional
fit("module", data)  # wrong: module

# --- an engine is a Trainer
trainer: Trainer = Engine()
assert_type(Engine().layout, Layout)
assert_type(polyphase.__version__, str)
Engine().fit(module, loader)
Engine().fitt(module, loader)  # wrong: fitt
Layout(replicate=2, shard=4)
Layout(replica=2)  # wrong: replica
Layout.derive(8, rest="shard", tp=2)
Layout.derive(8, rest="shards")  # wrong: rest
Snapshot(mode="min")
Snapshot(mode="minimum")  # wrong: mode


class Own(Engine):
    def __init__(self, callback: Callback) -> None:
        super().__init__(callbacks=[callback], stratgy="ddp")  # wrong: stratgy


def takes(model: LightningModule) -> Engine:
    return fit(model, data)
