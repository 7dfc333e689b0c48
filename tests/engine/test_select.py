"""From the engine's flags to Lightning's parts: what is chosen, and every contradiction by its message."""

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine.compression import COMM_HOOKS
from polyphase.engine.flags import LAUNCHERS
from polyphase.engine.strategies import STRATEGIES
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.fsdp.strategy import FSDP
from polyphase.engine.strategies.options import DDPOptions, FSDPOptions, HSDPOptions
from polyphase.engine.strategies.recompute import Recomputed
from polyphase.engine.strategies.sync_batchnorm import SyncBatchNorm
from tests.pairs import nightly

from .tiny import Seen, engine

MULTI = [name for name, row in STRATEGIES.items() if row.make]


# --- what is chosen


@pytest.mark.parametrize(
    ("devices", "num_nodes", "cls"), [(1, 1, SingleDeviceStrategy), (2, 1, DDP), (1, 2, DDP), ("auto", 1, None)]
)
def test_auto_is_single_on_one_device_else_ddp(devices, num_nodes, cls):
    cls = cls or (SingleDeviceStrategy if CPUAccelerator.auto_device_count() == 1 else DDP)
    assert type(engine(strategy="auto", devices=devices, num_nodes=num_nodes).strategy) is cls


def test_single_takes_one_of_many_devices():
    run = engine(strategy="single", devices="auto")
    assert type(run.strategy) is SingleDeviceStrategy
    assert run.world_size == 1


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("single", 1), ("ddp", 2)])
def test_float8_by_the_package_of_that_name_is_lightnings(strategy, devices):
    with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
        engine(strategy=strategy, devices=devices, precision="transformer-engine")


def test_float8_replaces_layers_which_others_would_have_to_know():
    with pytest.raises(ValueError, match=r"'fsdp' can't do precision .*engine': it works with single and ddp"):
        engine(strategy="fsdp", devices=2, precision="transformer-engine")


@pytest.mark.parametrize("suffix", list(LAUNCHERS))
@pytest.mark.parametrize(("name", "cls"), [("ddp", DDP), ("fsdp", FSDP), ("hsdp", FSDP)])
def test_a_name_and_a_suffix_choose_the_strategy_and_its_launcher(name, cls, suffix):
    run = engine(strategy=f"{name}_{suffix}" if suffix else name, devices=2)
    assert type(run.strategy) is cls
    assert run.strategy.launcher_suffix == suffix
    assert run.strategy.launcher.is_interactive_compatible is (LAUNCHERS[suffix] == "fork")
    assert run.layout.world_size == run.world_size == 2


@pytest.mark.parametrize(
    ("flag", "axes"),
    [
        ("ddp", {"replicate": 8}),
        ("fsdp", {"shard": 8}),
        ("hsdp", {"replicate": 2, "shard": 4}),
        ("hsdp:shard=2", {"replicate": 4, "shard": 2}),
        ("hsdp:replicate=4", {"replicate": 4, "shard": 2}),
        ("hsdp:replicate=1", {"replicate": 1, "shard": 8}),
        ("hsdp:replicate=2,shard=4", {"replicate": 2, "shard": 4}),
    ],
)
def test_the_layout_of_two_nodes_of_four_devices(flag, axes):
    layout = engine(strategy=flag, devices=4, num_nodes=2).layout
    assert layout.axes == {"pp": 1, "replicate": 1, "shard": 1, "tp": 1, "cp": 1, **axes}


def test_options_arrive_by_their_types():
    run = engine(strategy="ddp:static_graph=true,bucket_cap_mb=1,timeout_s=7.5")
    assert run.strategy.options == DDPOptions(static_graph=True, bucket_cap_mb=1.0, timeout_s=7.5)
    assert run.strategy._timeout == timedelta(seconds=7.5)
    assert engine(strategy="fsdp:no_sync=off", devices=2).strategy.options == FSDPOptions(no_sync=False)
    hsdp = engine(strategy="hsdp:shard=2,meta_init=1", devices=4).strategy.options
    assert hsdp == HSDPOptions(shard=2, meta_init=True)


def test_ddps_options_reach_distributed_data_parallel():
    options = {"find_unused_parameters": True, "static_graph": True, "bucket_cap_mb": 2.0}
    flag = ",".join(f"{key}={value}" for key, value in options.items())
    arguments = engine(strategy=f"ddp:{flag}").strategy._ddp_kwargs
    assert arguments == options
    assert engine(strategy="ddp").strategy._ddp_kwargs == {}
    renamed = engine(strategy="ddp:broadcast_buffers=false").strategy._ddp_kwargs
    assert renamed == {"forward_sync_buffers": False}


@pytest.mark.parametrize("suffix", list(LAUNCHERS))
@pytest.mark.parametrize("value", [True, False])
def test_lightnings_long_names_of_ddp_become_options(suffix, value):
    name = f"ddp{suffix and '_' + suffix}_find_unused_parameters_{str(value).lower()}"
    strategy = engine(strategy=name).strategy
    assert type(strategy) is DDP
    assert strategy.options == DDPOptions(find_unused_parameters=value)
    assert strategy.launcher_suffix == suffix


def test_a_long_name_takes_more_options():
    options = engine(strategy="ddp_find_unused_parameters_true:bucket_cap_mb=3").strategy.options
    assert options == DDPOptions(find_unused_parameters=True, bucket_cap_mb=3)


def test_a_strategy_object_of_lightnings_passes_through():
    strategy = DDPStrategy(find_unused_parameters=True)
    run = engine(strategy=strategy, devices=2, precision="bf16-mixed")
    assert run.strategy is strategy
    assert run.precision == "bf16-mixed"
    assert run.layout.replicate == 2


def test_a_name_of_lightnings_registry_passes_through():
    class Custom(DDPStrategy): ...

    StrategyRegistry.register("custom_for_this_test", Custom, description="")
    try:
        assert type(engine(strategy="custom_for_this_test").strategy) is Custom
        with pytest.raises(ValueError, match="'custom_for_this_test' is Lightning's own and takes no options by flag"):
            engine(strategy="custom_for_this_test:timeout_s=3")
    finally:
        StrategyRegistry.remove("custom_for_this_test")


@pytest.mark.parametrize(
    ("compression", "strategy"), [(c, name) for name, row in STRATEGIES.items() for c in row.compressions]
)
def test_each_compression_that_a_strategy_lists_is_taken(compression, strategy):
    run = engine(strategy=strategy, compression=compression, devices=2)
    assert run.bytes_compressed == 0
    assert run.strategy.comm_hook.name == compression


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_without_compression_no_bytes_are_counted(strategy):
    run = engine(strategy=strategy, compression="none")
    assert run.bytes_compressed is None
    assert getattr(run.strategy, "comm_hook", None) is None


def test_a_precision_plugin_of_the_users_is_kept():
    plugin = DoublePrecision()
    for plugins in (plugin, [plugin]):
        assert engine(plugins=plugins).precision_plugin is plugin


def test_sync_batchnorm_is_the_engines_own():
    assert isinstance(engine(strategy="ddp", sync_batchnorm=True).strategy._layer_sync, SyncBatchNorm)
    assert engine(strategy="ddp").strategy._layer_sync is None


@pytest.mark.parametrize("accelerator", ["cpu", CPUAccelerator()])
@pytest.mark.parametrize(("devices", "count"), [(2, 2), ("2", 2), (1, 1)])
def test_accelerators_and_devices_in_each_of_their_spellings(accelerator, devices, count):
    assert engine(accelerator=accelerator, devices=devices).num_devices == count


@pytest.mark.parametrize("policy", ["warn", "error", "ignore"])
def test_each_policy_for_what_is_not_finite_is_taken(policy):
    engine(nonfinite=policy).fit(Seen(), torch.utils.data.DataLoader(range(2)))


# --- what is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"strategy": "fdsp"},
            r"unknown strategy 'fdsp'\. Did you mean 'fsdp'\? Allowed: auto, cp, ddp, ddp\+cp, diloco, dp",
        ),
        ({"strategy": "ddp_spwan"}, r"Did you mean 'ddp_spawn'\?"),
        ({"strategy": "single_spawn"}, r"unknown strategy 'single_spawn'\. Did you mean 'single'\?"),
        ({"strategy": "ddp_foo_find_unused_parameters_true"}, "unknown strategy 'ddp_foo'"),
        ({"strategy": ""}, "strategy '' has no name"),
        ({"strategy": "auto:timeout_s=3"}, "auto has no options; name the strategy to give it some"),
        ({"strategy": "auto:2"}, "auto has no options"),
        ({"strategy": "ddp:2"}, r"strategy 'ddp:2': write ddp:key=value; '2' has no key"),
        ({"strategy": "single:a=1"}, "unknown option of strategy 'single' 'a'"),
        ({"strategy": "ddp:find_unused=1"}, r"'find_unused'\. Did you mean 'find_unused_parameters'\?"),
        ({"strategy": "ddp:static_graph=maybe"}, "static_graph must be true or false, but got 'maybe'"),
        ({"strategy": "ddp:bucket_cap_mb=big"}, "bucket_cap_mb must be a number, but got 'big'"),
        ({"strategy": "hsdp:shard=two"}, "shard must be a whole number, but got 'two'"),
        ({"strategy": "ddp:bucket_cap_mb=0"}, r"ddp:bucket_cap_mb must be greater than 0, but got 0\.0"),
        ({"strategy": "ddp:timeout_s=nan"}, "ddp:timeout_s must be greater than 0, but got nan"),
        ({"strategy": "fsdp:timeout_s=-1"}, r"timeout_s must be greater than 0, but got -1\.0"),
        ({"strategy": "single", "devices": 2}, r"'single' runs on one device, but .* 1 node\(s\) x 2 device\(s\)"),
        ({"strategy": "single", "num_nodes": 2}, r"'single' runs on one device, but .* 2 node\(s\) x 1 device\(s\)"),
        (
            {"strategy": "hsdp:replicate=2,shard=3", "devices": 4},
            r"replicate=2 x shard=3 = 6 does not fit 4 process\(es\)",
        ),
        ({"strategy": "hsdp:shard=3", "devices": 4}, r"shard=3 = 3 does not fit 4 process\(es\)"),
        ({"strategy": "hsdp:replicate=0", "devices": 4}, "the size of axis 'replicate' must be a whole number"),
        ({"compression": "gzip", "strategy": "ddp"}, "unknown compression 'gzip'"),
        ({"compression": "powersgd", "strategy": "fsdp"}, "'fsdp' can't do compression 'powersgd': each rank would"),
        (
            {"compression": "topk", "strategy": "fsdp"},
            r"hsdp supports all of them.* It can do: none, bf16, fp16, int8\.",
        ),
        (
            {"compression": "int8:feedback=true", "strategy": "fsdp"},
            "'fsdp' can't do int8:feedback=true: each rank would",
        ),
        ({"compression": "fp16", "strategy": "single"}, r"'single' can't do compression 'fp16': one process sends no"),
        ({"compression": "fp16", "strategy": "auto"}, "'single' can't do compression 'fp16'"),
        ({"precision": "8-true"}, r"^Precision '8-true' is invalid\. Did you mean '\d+-true'\? Allowed: 16-mixed"),
        ({"precision": "bf16-mixe"}, r"Did you mean 'bf16-mixed'\?"),
        ({"precision": 16, "plugins": DoublePrecision()}, "Received both `precision=16-mixed` and `plugins="),
        (
            {"accelerator": "cpuu"},
            r"`accelerator='cpuu'`\. Did you mean 'cpu'\? Allowed: auto, cpu",
        ),
        (
            {"devices": 0},
            r"devices=0\)` .*: a number of at least 1, -1 or 'auto' for all, or a list",
        ),
        ({"devices": "0"}, r"devices='0'\)` .*: a number of at least 1"),
        ({"devices": []}, r"devices=\[\]\)` .*: a number of at least 1"),
        ({"devices": -2}, r"devices=-2\)` .*: a number of at least 1"),
        ({"num_nodes": 0}, "num_nodes must be a whole number of at least 1, but got 0"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be a whole number of at least 1, but got 0"),
        ({"accumulate_grad_batches": 1.5}, r"accumulate_grad_batches must be a whole number .*, but got 1\.5"),
        ({"gradient_clip_val": -1.0}, r"gradient_clip_val must be at least 0, but got -1\.0"),
        ({"nonfinite": "eror"}, r"unknown value of nonfinite 'eror'\. Did you mean 'error'\? Allowed: error, ignore,"),
    ],
    ids=lambda value: (
        " ".join(f"{k}={v}" for k, v in value.items() if k != "plugins") if isinstance(value, dict) else ""
    ),
)
@pytest.mark.filterwarnings("ignore:`precision=16` is supported for historical reasons")
def test_a_wrong_flag_is_an_error_when_the_engine_is_built(flags, message):
    with pytest.raises(ValueError, match=message):
        engine(**flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"strategy": None},
        {"strategy": 3},
        {"compression": None},
        {"nonfinite": None},
        {"nonfinite": False},
        {"gradient_clip_val": "big"},
        {"gradient_clip_val": float("nan")},
        {"strategy": "ddp:timeout_s=inf"},
        {"strategy": "fsdp:timeout_s=1e300"},
        {"strategy": "ddp:bucket_cap_mb=inf"},
    ],
    ids=str,
)
def test_a_flag_of_the_wrong_kind_is_an_error_that_names_it(flags):
    name, value = next(iter(flags.items()))
    if isinstance(value, str) and ":" in value:
        name = value.partition(":")[2].partition("=")[0]
    with pytest.raises((ValueError, TypeError), match=name):
        engine(**flags)


@pytest.mark.parametrize("devices", [-1, "-1"])
def test_all_devices_by_minus_one_as_the_message_about_devices_promises(devices):
    assert engine(devices=devices).num_devices == CPUAccelerator.auto_device_count()


@pytest.mark.parametrize("strategy", [DDPStrategy(), SingleDeviceStrategy(device=torch.device("cpu"))])
def test_lightnings_own_strategies_have_no_compression(strategy):
    name = type(strategy).__name__
    ours = ", ".join(flag for flag, row in STRATEGIES.items() if row.compressions)
    with pytest.raises(ValueError, match=f"works with the strategies {ours}, not with Lightning's own {name}"):
        engine(strategy=strategy, compression="fp16")


def test_the_sizes_in_a_flag_are_an_error_before_the_process_group_exists():
    with pytest.raises(ValueError, match="does not fit 4"):
        engine(strategy="hsdp:replicate=3,shard=2", devices=4)
    assert not torch.distributed.is_initialized()


# --- the table itself


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_each_row_explains_itself(name):
    row = STRATEGIES[name]
    assert row.description
    assert dataclasses.is_dataclass(row.options)
    assert row.options() == row.options()
    assert row.why_not or len(row.compressions) == len(COMM_HOOKS)


@pytest.mark.parametrize("name", MULTI)
def test_each_row_makes_a_strategy_of_lightnings_kind(name):
    row = STRATEGIES[name]
    made = row.make(row.options(), "spawn", None)
    assert isinstance(made, Strategy)
    assert made.derive_layout(1).world_size == 1


@pytest.mark.parametrize("flag", ["DDP", "ddp", "Ddp_Spawn", "DDP_FIND_UNUSED_PARAMETERS_TRUE"])
def test_names_may_be_written_in_capitals(flag):
    assert isinstance(engine(strategy=flag, devices=2).strategy, DDP)


def test_an_accelerator_that_is_not_here_is_named_before_its_devices_are_counted():
    with pytest.raises(MisconfigurationException, match=r"`XLAAccelerator` can not run on your system .* here: cpu"):
        engine(accelerator="tpu", devices=8)


# --- strategies that divide, on one device

DIVIDING = [
    *("fsdp", "hsdp", "tp", "fsdp+tp", "hsdp+tp", "cp", "ddp+cp", "fsdp+cp", "hsdp+cp", "pp", "pp+ddp", "pp+fsdp"),
]


@pytest.mark.parametrize("suffix", list(LAUNCHERS))
@pytest.mark.parametrize("name", DIVIDING)
def test_what_only_divides_is_single_on_one_device(name, suffix):
    run = engine(strategy=f"{name}_{suffix}" if suffix else name)
    assert type(run.strategy) is SingleDeviceStrategy
    assert (str(run.layout), run.world_size) == ("one device", 1)
    assert engine(strategy=name, num_nodes=2).world_size == 2
    assert type(engine(strategy=name, num_nodes=2).strategy) is not SingleDeviceStrategy


def test_each_strategy_either_divides_or_acts_on_one_device_too():
    assert {name for name, row in STRATEGIES.items() if row.is_single_alone(row.options())} == set(DIVIDING)


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("fsdp", {"compression": "int8"}),
        ("hsdp", {"offload": "parameters"}),
        ("fsdp+tp", {"offload": ["activations", "parameters"]}),
        ("pp:microbatches=2", {}),
        (FSDP(FSDPOptions()), {}),
    ],
)
def test_what_acts_on_one_device_too_keeps_its_strategy(strategy, flags):
    if "activations" in flags.get("offload", ()):
        with pytest.raises(ValueError, match=r"offload='activations' can't be done under 'fsdp\+tp'"):
            engine(strategy=strategy, **flags)
    else:
        assert type(engine(strategy=strategy, **flags).strategy) is not SingleDeviceStrategy


@pytest.mark.parametrize("strategy", ["hsdp:shard=2", "hsdp:replicate=2", "tp:tp=2", "pp:pipeline_size=2"])
def test_sizes_of_several_devices_are_refused_on_one(strategy):
    with pytest.raises(ValueError, match=r"the layout .* = 2 does not fit 1 process"):
        engine(strategy=strategy)


class Steps(LightningModule):
    """Blocks that draw numbers; notes what training has left on the module while it runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def on_train_batch_end(self, *unused: Any) -> None:
        self.kinds = {type(parameter) for parameter in self.parameters()}
        tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
        self.num_hooks = sum(len(getattr(part, table)) for part in self.modules() for table in tables)
        self.is_connected = torch.distributed.is_initialized()
        self.recompute = [isinstance(block.forward, Recomputed) for block in self.blocks]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _steps(strategy: str, module: LightningModule | None = None, **flags: Any) -> Any:
    module = module or Steps()
    engine(strategy=strategy, gradient_clip_val=0.1, **flags).fit(
        module, DataLoader(torch.randn(12, 8, generator=torch.Generator().manual_seed(2)), batch_size=2)
    )
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["fsdp", "tp", *nightly("hsdp", "fsdp+tp", "hsdp+tp", "pp", "pp+ddp", "pp+fsdp")])
def test_one_rank_trains_the_plain_module_with_the_weights_of_single(name, precision):
    expected = _steps("single", precision=precision)
    module = _steps(name, precision=precision)
    assert module.kinds == {nn.Parameter}
    assert (module.num_hooks, module.is_connected) == (0, False)
    assert {type(block) for block in module.blocks} == {nn.Sequential}
    for (key, tensor), other in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), key


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_activation_checkpointing_by_an_option_is_honoured_on_one_device(name):
    module = _steps(f"{name}:activation_checkpointing=true")
    assert module.recompute == [True, True]
    with pytest.raises(ValueError, match="contradicts the strategy's option activation_checkpointing=true"):
        engine(strategy=f"{name}:activation_checkpointing=true", activation_checkpointing="selective")


@pytest.mark.parametrize("name", ["single", "fsdp", "fsdp:meta_init=true"])
def test_a_module_on_the_meta_device_gets_the_weights_that_it_would_have_drawn(name):
    with torch.device("meta"):
        module = Steps()
    torch.manual_seed(1)
    _steps(name, module)
    expected = _steps("single")
    for (key, tensor), other in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), key
