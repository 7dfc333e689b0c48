"""Fine-tuning by a flag: ``finetune="lora:rank=8"`` freezes a module, and trains two small matrices beside each layer.

A linear layer's output gets ``alpha / rank * B(A(dropout(x)))`` added, where B is zero at first (LoRA, Hu et al. 2021,
https://arxiv.org/abs/2106.09685). The layers are those of peft (https://huggingface.co/docs/peft). They take the place
of the module's before a strategy splits it, and draw from the run's seed, so all ranks have the same ones; a strategy
then finds a module with frozen parameters, of which an optimizer gets no gradient and keeps no state.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from .checkpoint.adapters import STATE_KEY, Adapters
from .distributed.environment import global_seed
from .errors import RefusedError
from .finetune_options import ALL_LINEAR, FINETUNES, LoRAOptions
from .flags import check_count, check_number, choose, did_you_mean, parse_flag, parse_options
from .strategies.units import block_lists, named_blocks

__all__ = ["FineTuning", "make_finetuning"]

_ROOT = "polyphase_root"
"""Name of the module that is fine-tuned, in one that holds nothing else: no other name begins with it."""


def make_finetuning(flag: str) -> "FineTuning | None":
    """The callback of the flag `finetune`; None for ``"none"``.

    Raises:
        ValueError: an unknown name or option, or a value that is out of range.
        RefusedError: peft is not installed.
    """
    parsed = parse_flag(flag, "finetune")
    if choose("finetune", parsed.name, FINETUNES) == "none":
        if parsed.value or parsed.options:
            raise ValueError(f"finetune 'none' takes no options; remove them from {flag!r}.")
        return None
    texts = dict(parsed.options)
    if parsed.value is not None:
        if "rank" in texts:
            raise ValueError(f"{flag!r} has two ranks: write lora:{parsed.value} or lora:rank={texts['rank']}.")
        texts["rank"] = parsed.value
    options = parse_options("finetune 'lora'", LoRAOptions, texts)
    check_count("lora:rank", options.rank)
    if options.alpha is not None:
        check_count("lora:alpha", options.alpha)
    if check_number("lora:dropout", options.dropout) >= 1:
        raise ValueError(f"lora:dropout must be less than 1, but got {options.dropout!r}.")
    _peft()
    return FineTuning(flag, options)


def _peft() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "invalid escape sequence")  # in torchao, which peft imports
            return importlib.import_module("peft")
    except ImportError as error:
        raise RefusedError(f"finetune='lora' needs peft: pip install 'polyphase[lora]'. ({error})") from error


class FineTuning(Callback):
    """Adds adapters to the module of a run; what they are is in the run's checkpoints.

    Args:
        flag: as the user wrote it.
        options: its options.
    """

    adapters: Adapters | None = None
    """Those of the module, once it has them."""

    def __init__(self, flag: str, options: LoRAOptions) -> None:
        self.flag, self.options = flag, options
        self._names: frozenset[str] = frozenset()

    @property
    def state_key(self) -> str:
        """See `Callback`."""
        return STATE_KEY

    def prepare(self, module: LightningModule, *, is_copied: bool) -> None:
        """Adds the adapters to a module that is complete, before any process starts.

        Args:
            module: changed in place.
            is_copied: whether the processes of the run get copies of `module`, and send back its weights alone.

        Raises:
            ValueError: it can't have them.
        """
        if not is_overridden("configure_model", module):
            self._add(module)
        elif is_copied:
            raise ValueError(
                f"finetune={self.flag!r} adds adapters to what {type(module).__name__}.configure_model() makes, in"
                " processes whose module is lost at their end: make the layers in the constructor, or choose a strategy"
                " without the suffix _spawn, _fork or _notebook."
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Adds them, or has them added at the end of the module's `configure_model`."""
        if not is_overridden("configure_model", pl_module):
            self._add(pl_module)
            return
        configure: Callable[[], None] = pl_module.configure_model
        own = vars(pl_module).get("configure_model")

        def configure_model() -> None:
            del vars(pl_module)["configure_model"]
            if own is not None:
                vars(pl_module)["configure_model"] = own
            configure()
            self._add(pl_module)

        vars(pl_module)["configure_model"] = configure_model

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that no layer was made after the adapters.

        Raises:
            ValueError: one was: it would be trained whole, and be in no folder of adapters.
        """
        late = [name for name, _ in pl_module.named_parameters() if name not in self._names]
        if late:
            raise ValueError(
                f"finetune={self.flag!r} came before {', '.join(late[:3])} of {type(pl_module).__name__}: make layers"
                " in its constructor or in configure_model."
            )

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {} if self.adapters is None else self.adapters.as_plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that the checkpoint has the same adapters: weights of others would have another effect.

        Raises:
            ValueError: it has not.
        """
        plain = self.state_dict()
        if any(state_dict[key] != plain[key] for key in ("rank", "alpha", "layers")):
            raise ValueError(
                f"finetune={self.flag!r} does not fit the checkpoint, which has adapters of rank {state_dict['rank']}"
                f" with alpha {state_dict['alpha']} in {len(state_dict['layers'])} layers: give the flag of its run."
            )

    def _add(self, module: LightningModule) -> None:
        self.adapters = add_adapters(module, self.options)
        self._names = frozenset(name for name, _ in module.named_parameters())


def add_adapters(module: nn.Module, options: LoRAOptions) -> Adapters:
    """Freezes a module and adds adapters, unless it has just these; returns a description of them.

    Raises:
        ValueError: there are no such layers, a layer can't have one, or the module has other adapters.
    """
    alpha = options.alpha or 2 * options.rank
    names = _targets(module, options.targets)
    layers = dict(_adapted(module))
    if layers:
        wanted = {"default": options.rank}, {"default": alpha}
        is_same = all((getattr(layer, "r", 0), getattr(layer, "lora_alpha", 0)) == wanted for layer in layers.values())
        if layers.keys() != set(names) or not is_same:
            raise ValueError(
                f"{type(module).__name__} has adapters already, by peft or of another flag: leave finetune out, or"
                " build the module anew."
            )
    else:
        _inject(module, names, options, alpha)
        layers = dict(_adapted(module))
    return Adapters(
        rank=options.rank,
        alpha=alpha,
        dropout=options.dropout,
        names=() if options.targets == ALL_LINEAR else tuple(options.targets.split("+")),
        layers={name: bool(getattr(layer, "fan_in_fan_out", False)) for name, layer in layers.items()},
    )


def _inject(module: nn.Module, names: list[str], options: LoRAOptions, alpha: int) -> None:
    peft = _peft()
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=alpha,
        lora_dropout=options.dropout,
        target_modules=[f"{_ROOT}.{name}" for name in names],
    )
    # peft writes to the module that it is called with, and reads its `config`, which may be anything here.
    root = nn.Module()
    root.add_module(_ROOT, module)
    # The CPU's numbers alone are restored, so no others may be drawn.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # to that of each layer
        torch.default_generator.manual_seed(global_seed())
        peft.inject_adapter_in_model(config, root)
        for _, layer in _adapted(module):
            pair = nn.ModuleList([layer.lora_A, layer.lora_B])
            if any(
                parameter.is_meta for parameter in pair.parameters()
            ):  # as the layer's weight, which is still to be read
                pair.to_empty(device="cpu")
                layer.reset_lora_parameters("default", init_lora_weights=True)
            if any(
                parameter.itemsize < 4 for parameter in pair.parameters()
            ):  # peft, too, trains no adapters of 16 bits
                pair.float()


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the layers with adapters, and those that other methods of peft have replaced."""
    kind = _peft().tuners.tuners_utils.BaseTunerLayer
    yield from ((name, part) for name, part in module.named_modules() if isinstance(part, kind))


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    """The layers that can have adapters, or have them, by name; a layer under several names has several entries."""
    adapted = {name for name, _ in _adapted(module)}
    inside = tuple(f"{name}." for name in adapted)
    return {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if name in adapted or (_is_linear(part) and not name.startswith(inside))
    }


def _is_linear(part: nn.Module) -> bool:
    is_conv1d = type(part).__name__ == "Conv1D" and type(part).__module__ == "transformers.pytorch_utils"
    is_plain = isinstance(part, nn.Linear) and part._parameters.get("weight") is not None
    return is_conv1d or is_plain


def _targets(module: nn.Module, text: str) -> list[str]:
    """The names of the layers that get adapters."""
    linears = _linears(module)
    kind = type(module).__name__
    if text == ALL_LINEAR:
        # The output projection of nn.MultiheadAttention is read, and never called.
        linears = {name: part for name, part in linears.items() if not _reader_of(module, name)}
        chosen = _in_blocks(module, linears) or list(linears)
    else:
        chosen = [layer for name in text.split("+") for layer in _named(name, linears, kind)]
    if not chosen:
        raise ValueError(f"finetune='lora' adds to linear layers, and {kind} has none.")
    for name in chosen:
        if reader := _reader_of(module, name):
            raise ValueError(
                f"{name} can't have an adapter: {reader} reads its weight and does not call it. Leave it out of"
                " lora:targets."
            )
        if len(alike := [other for other, part in linears.items() if part is linears[name]]) > 1:
            raise ValueError(
                f"{' and '.join(alike)} are one layer, which can't have an adapter in two places: leave them out of"
                " lora:targets."
            )
    return list(dict.fromkeys(chosen))


def _in_blocks(module: nn.Module, linears: dict[str, nn.Module]) -> list[str]:
    blocks = [*named_blocks(module), *(block for _, blocks in block_lists(module) for block in blocks)]
    parts = {part for block in blocks for part in block.modules()}
    return [name for name, part in linears.items() if part in parts]


def _named(name: str, linears: dict[str, nn.Module], kind: str) -> list[str]:
    """The layers whose name is, or ends with, a name of the flag."""
    matching = [linear for linear in linears if linear == name or linear.endswith(f".{name}")]
    if not matching:
        last = list(dict.fromkeys(linear.rpartition(".")[2] for linear in linears))
        raise ValueError(
            f"lora:targets has {name!r}, but {kind} has no linear layer of that name.{did_you_mean(name, last)}"
            f" It has: {', '.join(last) or 'none'}."
        )
    return matching


def _reader_of(module: nn.Module, name: str) -> str:
    """Names the module that reads the weight of a layer without a call of it; "" if none is known."""
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.MultiheadAttention):
        return "nn.MultiheadAttention"
    if isinstance(owner, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
        return "the fast path of nn.TransformerEncoderLayer (see torch.backends.mha.set_fastpath_enabled)"
    return ""
