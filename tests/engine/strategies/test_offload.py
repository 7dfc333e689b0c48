"""What can't be offloaded is refused by name, with what can be done."""

import lightning.pytorch.strategies as lightnings
import pytest

from polyphase.engine.errors import RefusedError

from ..tiny import Regression, engine, rows


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"offload": "parameters"}, "choose 'fsdp'"),
        ({"offload": "parameters", "strategy": "tp", "devices": 2}, "choose 'fsdp'"),
        ({"offload": "parameters", "strategy": lightnings.ModelParallelStrategy(), "devices": 2}, "choose 'fsdp'"),
        ({"offload": "optimizer", "strategy": "fsdp", "devices": 2}, "can't be done alone"),
        ({"offload": ["optimizer", "activations"]}, "can't be done alone"),
        ({"offload": "activations", "strategy": "tp", "devices": 2}, "can't be done under 'tp'"),
        ({"offload": ["activations"], "strategy": "pp", "devices": 2}, "can't be done under 'pp'"),
        ({"offload": "activations", "compile": "max-autotune"}, "brings back what they keep in other memory"),
        ({"offload": "activation"}, "Did you mean 'activations'"),
        ({"offload": ["gradients"]}, "offload="),
    ],
)
def test_what_cannot_be_offloaded_is_refused(flags, said):
    with pytest.raises(RefusedError, match=said):
        engine(**flags)


@pytest.mark.parametrize("names", ["parameters", ["parameters", "optimizer"]])
def test_parameters_are_offloaded_by_fsdp(names):
    assert engine(strategy="fsdp", devices=2, offload=names).strategy.offloads_parameters
    assert not engine(strategy="fsdp", devices=2).strategy.offloads_parameters


def test_activations_of_a_host_are_there_already():
    trainer = engine(offload="activations")
    trainer.fit(Regression(), rows())
    assert "train_step_context" not in vars(trainer.precision_plugin)
