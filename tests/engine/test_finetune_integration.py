"""LoRA by the flag `finetune`: as peft in a plain loop, under every strategy, in checkpoints and folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException

from polyphase.engine import Engine, read_weights
from polyphase.engine.checkpoint.commands import main as ckpt
from polyphase.engine.errors import RefusedError
from polyphase.engine.finetune import _peft, add_adapters
from polyphase.engine.finetune_options import LoRAOptions
from polyphase.engine.strategies import make_plan
from tests.engine.eager_graphs import eager_graphs
from tests.engine.parity import MLP, QUIET, build, largest_difference, loader, plain_loop, suffixed
from tests.engine.tiny import SavesIn
from tests.pairs import nightly

peft = _peft()
GPT = "gpt, tied"
STEPS, ACCUMULATE, RANK = 6, 2, 4
TOLERANCE = 1e-6
"""Of 6 steps; one of them moves a weight by 1e-3."""


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")


def with_peft(module: nn.Module, targets: list[str]) -> None:
    """Adapters as peft's own users add them, from the same seed."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
    peft.inject_adapter_in_model(config, module)


def expected(num_steps: int = STEPS) -> dict[str, Tensor]:
    module = build(GPT)
    with_peft(module, [name for name, part in module.net.blocks.named_modules() if isinstance(part, nn.Linear)])
    return plain_loop(module, loader(GPT, ACCUMULATE, num_steps=num_steps), ACCUMULATE, 0.5)


def run(
    flag: str, devices: int, *, path: Path | None = None, module: LightningModule | None = None, **flags: Any
) -> Engine:
    engine = Engine(
        strategy=suffixed(flag, "fork"),
        accelerator="cpu",
        devices=devices,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        **{"max_epochs": 1, "finetune": f"lora:rank={RANK}", **QUIET, **flags},
    )
    module = build(GPT) if module is None else module
    engine.fit(module, loader(GPT, ACCUMULATE, engine.data_size, STEPS), ckpt_path=path)
    return engine


STRATEGIES = [("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp", 2), ("tp", 2), ("pp", 2)]
MORE = [("hsdp:replicate=2", 4), ("fsdp+tp:tp=2", 4), ("pp+fsdp", 4), ("cp", 2), ("fsdp+cp:cp=2", 2), ("ps", 2)]


@pytest.mark.parametrize(("flag", "devices"), [*STRATEGIES, *nightly(*MORE)])
def test_equals_a_plain_loop_with_peft(flag, devices):
    weights = run(flag, devices).model.state_dict()
    assert largest_difference(weights, expected()) < TOLERANCE


def test_tp_splits_an_adapter_as_its_layer():
    module = build(GPT)
    add_adapters(module, LoRAOptions(rank=RANK))
    names = {name.removeprefix("net.blocks.0.") for name in make_plan(module, 2).styles if ".0." in name}
    layers = ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]
    adapters = {"attention.qkv.lora_B", "attention.out.lora_A", "mlp.up.lora_B", "mlp.down.lora_A"}
    regions = {"attention", "mlp"}
    assert names == {*(f"{name}.base_layer" for name in layers), *(f"{name}.default" for name in adapters), *regions}


@pytest.mark.parametrize("flag", ["local_sgd", *nightly("diloco")])
def test_workers_apart_exchange_adapters_alone(flag):
    module, before = build(GPT), build(GPT).state_dict()
    run(f"{flag}:sync_every=2", 2, module=module)
    plain = {name.replace(".base_layer", ""): value for name, value in module.state_dict().items()}
    assert all(torch.equal(plain[name], value) for name, value in before.items())
    assert max(value.abs().max() for name, value in plain.items() if "lora_B" in name) > 1e-3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own compiler
@pytest.mark.parametrize(("flag", "devices"), [("fsdp", 2), *nightly(("single", 1), ("ddp", 2), ("tp", 2), ("pp", 2))])
def test_with_activation_checkpointing_and_compile(flag, devices, monkeypatch):
    eager_graphs(monkeypatch)
    weights = run(flag, devices, activation_checkpointing="full", compile=True).model.state_dict()
    assert largest_difference(weights, expected()) < TOLERANCE


class Measures(Callback):
    """Writes the bytes of the moments that a rank keeps, of its trained parameters, and of the frozen ones."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        local = [getattr(p, "_local_tensor", p) for p in pl_module.parameters() if p.requires_grad]
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        moments = [
            getattr(state[key], "_local_tensor", state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")
        ]
        kept, trained = sum(t.nbytes for t in moments), sum(t.nbytes for t in local)
        frozen = sum(getattr(p, "_local_tensor", p).nbytes for p in pl_module.parameters() if not p.requires_grad)
        Path(f"{self.path}-{trainer.global_rank}").write_text(json.dumps([kept, trained, frozen]))


@pytest.mark.parametrize(("flag", "devices", "shares"), [("single", 1, 1), ("ddp", 2, 1), ("fsdp", 2, 2)])
def test_the_optimizer_keeps_two_moments_of_adapters_and_the_base_is_sharded(tmp_path, flag, devices, shares):
    run(flag, devices, callbacks=[Measures(tmp_path / "bytes")])
    module = build(GPT)
    whole = sum(p.nbytes for p in module.parameters())
    add_adapters(module, LoRAOptions(rank=RANK))
    adapters = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    for rank in range(devices):
        kept, trained, frozen = json.loads((tmp_path / f"bytes-{rank}").read_text())
        assert (kept, trained) == (2 * adapters // shares, adapters // shares)
        assert frozen == whole // shares


# --- checkpoints and folders


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (("ddp", 2), ("fsdp", 2)),
        (("fsdp", 2), ("single", 1)),
        *nightly((("tp", 2), ("pp", 2)), (("pp", 2), ("ddp", 2))),
    ],
)
def test_a_checkpoint_goes_on_elsewhere_with_the_base_frozen(tmp_path, saved, resumed):
    path = tmp_path / "half"
    run(*saved, callbacks=[SavesIn("on_train_batch_end", ACCUMULATE * STEPS // 2, path)], max_steps=STEPS // 2)
    module = run(*resumed, path=path).model
    assert largest_difference(module.state_dict(), expected()) < TOLERANCE
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in module.named_parameters() if ".lora_" in name}


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path):
    run("single", 1, callbacks=[SavesIn("on_train_end", 1, tmp_path / "x")])
    with pytest.raises(ValueError, match="does not fit the checkpoint, which has adapters of rank 4 with alpha 8 in 8"):
        run("single", 1, path=tmp_path / "x", finetune="lora:rank=4,alpha=4")


@pytest.mark.parametrize(("flag", "devices"), [("single", 1), *nightly(("fsdp", 2), ("tp", 2), ("pp", 2))])
@pytest.mark.parametrize(
    ("saved", "resumed", "what"),
    [
        ("lora:4", "none", r"It was written with finetune='lora:rank=4,alpha=8': give that flag again\..*lora_A"),
        ("none", "lora:4", r"It was written without finetune: leave that flag out.*lora_A"),
    ],
)
def test_a_checkpoint_with_adapters_needs_the_flag_and_another_none(tmp_path, flag, devices, saved, resumed, what):
    run(flag, devices, callbacks=[SavesIn("on_train_end", 1, tmp_path / "x")], finetune=saved)
    kind = RuntimeError if devices == 1 else ProcessRaisedException
    with pytest.raises(kind, match=f"(?s)does not fit the module. {what}"):
        run(flag, devices, path=tmp_path / "x", finetune=resumed)


@pytest.mark.parametrize(("flag", "devices"), [("single", 1), ("fsdp", 2), *nightly(("ddp", 2), ("tp", 2), ("pp", 2))])
def test_peft_reads_the_folder_and_merged_weights_do_the_same(tmp_path, flag, devices):
    class Exports(SavesIn):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.export(tmp_path / "adapters", adapters="net")
            trainer.export(tmp_path / "merged.safetensors")
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    run(flag, devices, callbacks=[Exports("on_train_end", 1, tmp_path / "end")])
    batch = next(iter(loader(GPT, ACCUMULATE)))[:, :-1]
    trained, merged, read, weights = build(GPT), build(GPT), build(GPT), expected()
    with torch.no_grad():
        before = read(batch)
        add_adapters(trained, LoRAOptions(rank=RANK))
        trained.load_state_dict(weights)
        merged.load_state_dict(load_file(tmp_path / "merged.safetensors"))
        by_peft = peft.PeftModel.from_pretrained(read.net, tmp_path / "adapters")
        assert (trained(batch) - before).abs().max() > 1e-3
        assert torch.allclose(by_peft(batch), trained(batch), atol=1e-6)
        assert torch.allclose(merged(batch), trained(batch), atol=1e-6)
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (RANK, 2 * RANK)
    assert settings["target_modules"] == ["down", "out", "qkv", "up"]

    assert ckpt(["export", str(tmp_path / "end"), "--to", str(tmp_path / "again"), "--adapters", "net"]) == 0
    name, whole = "adapter_model.safetensors", "merged.safetensors"
    for path in ("end", "weights.ckpt"):
        assert ckpt(["export", str(tmp_path / path), "--to", str(tmp_path / f"{path}.safetensors")]) == 0
    for one, other in (
        ("adapters/" + name, "again/" + name),
        (whole, "end.safetensors"),
        (whole, "weights.ckpt.safetensors"),
    ):
        assert largest_difference(load_file(tmp_path / one), load_file(tmp_path / other)) == 0


def test_a_folder_is_for_a_part_that_has_all_adapters(tmp_path):
    engine = run("single", 1, max_steps=1)
    with pytest.raises(ValueError, match=r"would leave out the adapter of net\.blocks\.1"):
        engine.export(tmp_path / "x", adapters="net.blocks.0")
    with pytest.raises(RefusedError, match="the run had no finetune"):
        run("single", 1, max_steps=1, finetune="none").export(tmp_path / "x", adapters="net")
    engine.save_checkpoint(tmp_path / "plain.ckpt")
    assert (
        ckpt(
            ["export", str(tmp_path / "plain.ckpt"), "--to", str(tmp_path / "x"), "--adapters", "", "--huggingface", ""]
        )
        == 2
    )


# --- the module


class Later(MLP):
    """Makes its layers when a run begins."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def digits() -> Any:
    return loader("mlp", 1, num_steps=2)


@pytest.mark.parametrize("flag", ["single", "fsdp:meta_init=true", *nightly("fsdp:rank0_init=true")])
def test_layers_that_configure_model_makes(flag):
    module = Later()
    engine = Engine(strategy=flag, accelerator="cpu", devices=1, max_epochs=1, finetune="lora:2", **QUIET)
    engine.fit(module, digits())
    assert "configure_model" not in vars(module)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2
    engine.fit(module, digits())
    assert [name for name, p in module.named_parameters() if p.requires_grad] == trained


def test_weights_that_are_read_by_shards(tmp_path):
    engine = run("single", 1, max_steps=1, finetune="none")
    engine.export(tmp_path / "base.safetensors")
    whole = build(GPT)
    whole.load_state_dict(load_file(tmp_path / "base.safetensors"))
    stored = build(GPT)
    stored.net = read_weights(tmp_path / "base.safetensors", lambda: build(GPT).net, prefix="net.")
    run("fsdp", 2, module=stored)
    base = {name.replace(".base_layer", ""): v for name, v in stored.state_dict().items() if ".lora_" not in name}
    assert largest_difference(base, whole.state_dict()) == 0
    assert max(v.abs().max() for name, v in stored.state_dict().items() if "lora_B" in name) > 1e-3


def test_verify_compares_with_adapters_in_one_process():
    engine = Engine(strategy="ddp_fork", devices=2, finetune="lora:2", **QUIET, accelerator="cpu")
    certificate = engine.verify(build("mlp"), loader("mlp", 1, 2), steps=2)
    assert certificate.equal
    assert len(certificate.differences) == 2


class Wrapped(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8)
        self.twice = self.net[0]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("lora:rank=0", "lora:rank must be a whole number of at least 1"),
        ("lora:alpha=0", "lora:alpha must be"),
        ("lora:dropout=1", "lora:dropout must be less than 1"),
        ("lora:ranks=4", "unknown option of finetune 'lora' 'ranks'. Did you mean 'rank'?"),
        ("lora:4,rank=4", "has two ranks"),
        ("lor", "unknown finetune 'lor'. Did you mean 'lora'?"),
        ("none:4", "'none' takes no options"),
    ],
)
def test_flags_that_are_refused(flag, message):
    with pytest.raises(RefusedError, match=message.replace("?", "\\?")):
        Engine(finetune=flag, **QUIET)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("net.3", "lora:targets has 'net.3', but Wrapped has no linear layer of that name"),
        ("out_proj", "attention.out_proj can't have an adapter: nn.MultiheadAttention reads its weight"),
        ("linear1", "the fast path of nn.TransformerEncoderLayer"),
        ("net.0", "net.0 and twice are one layer"),
    ],
)
def test_layers_that_are_refused(targets, message):
    engine = Engine(finetune=f"lora:targets={targets}", accelerator="cpu", devices=1, **QUIET)
    with pytest.raises(RefusedError, match=message):
        engine.fit(Wrapped(), digits())


def test_other_adapters_are_refused():
    module = build("mlp")
    with_peft(module, ["net.0"])
    engine = Engine(finetune="lora:2", accelerator="cpu", devices=1, **QUIET)
    with pytest.raises(RefusedError, match="MLP has adapters already"):
        engine.fit(module, digits())


def test_layers_made_too_late_are_refused():
    class Grows(MLP):
        def setup(self, stage: str) -> None:
            self.more = nn.Linear(2, 2)

    with pytest.raises(
        ValueError, match=r"came before more.weight, more.bias of Grows: make layers in its constructor"
    ):
        Engine(finetune="lora:2", accelerator="cpu", devices=1, max_steps=1, **QUIET).fit(Grows(), digits())
    with pytest.raises(RefusedError, match=r"adds adapters to what Later\.configure_model"):
        Engine(strategy="ddp_fork", devices=2, finetune="lora:2", accelerator="cpu", **QUIET).fit(Later(), digits())


def test_products_in_float8_are_refused(monkeypatch):
    monkeypatch.setattr("polyphase.engine.engine.OF_BLOCKS", {"bf16-mixed": ""})  # the CPU has no others
    with pytest.raises(RefusedError, match="has not been tried with precision='bf16-mixed'"):
        Engine(finetune="lora", precision="bf16-mixed", accelerator="cpu", devices=1, **QUIET)


def test_the_random_numbers_of_the_run_stay():
    torch.manual_seed(3)
    numbers = torch.rand(3)
    module = build("mlp")
    torch.manual_seed(3)
    add_adapters(module, LoRAOptions(rank=2))
    assert torch.equal(torch.rand(3), numbers)
