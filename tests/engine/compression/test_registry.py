"""From a compression flag to its comm hook, and every way of getting it wrong."""

import re
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from polyphase.engine.compression import COMM_HOOKS, CommHook, make_comm_hook
from polyphase.engine.compression.powersgd import PowerSGD
from tests.engine.tiny import Regression, engine, rows


def test_none_is_no_hook():
    assert make_comm_hook("none") is None


@pytest.mark.parametrize("name", list(COMM_HOOKS))
def test_each_name_makes_its_hook_with_nothing_counted_yet(name):
    hook = make_comm_hook(name)
    assert type(hook) is COMM_HOOKS[name]
    assert isinstance(hook, CommHook)
    assert hook.name == name
    assert hook.description
    assert (hook.num_calls, hook.num_bytes) == (0, 0)
    ForkingPickler.dumps(hook)  # as ddp_spawn does


def test_two_hooks_share_nothing():
    assert make_comm_hook("fp16") is not make_comm_hook("fp16")


@pytest.mark.parametrize(
    ("flag", "rank", "start"),
    [
        ("powersgd", 4, 10),
        ("powersgd:2", 2, 10),
        ("powersgd:rank=2", 2, 10),
        ("powersgd:start=2", 4, 2),
        ("powersgd:2,start=100", 2, 100),
        ("powersgd:start=100,rank=2", 2, 100),
        ("powersgd:2+fp16", 2, 10),
    ],
)
def test_powersgds_options(flag, rank, start):
    hook = make_comm_hook(flag)
    assert isinstance(hook, PowerSGD)
    assert (hook.rank, hook.start) == (rank, start)


ALLOWED = "Allowed: auto, bf16, fp16, int8, none, powersgd, sign, topk."


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("powersdg", f"unknown compression 'powersdg'. Did you mean 'powersgd'? {ALLOWED}"),
        ("zip", f"unknown compression 'zip'. {ALLOWED}"),
        ("", "compression '' has no name"),
        (None, "compression must be a text such as 'name' or 'name:key=value', but got None"),
        ("powersgd:rnak=2", "unknown option of compression 'powersgd' 'rnak'. Did you mean 'rank'?"),
        ("fp16:rank=2", "unknown option of compression 'fp16' 'rank'."),
        ("none:rank=2", "unknown option of compression 'none' 'rank'."),
        ("fp16:2", "compression 'fp16' can't take the value '2'; remove it from 'fp16:2'."),
        ("none:2", "compression 'none' can't take the value '2'; remove it from 'none:2'."),
        ("sign:2", "compression 'sign' can't take the value '2'; remove it from 'sign:2'."),
        ("powersgd:2,rank=3", "compression 'powersgd' can't take the value '2'; remove it from 'powersgd:2,rank=3'."),
        ("powersgd:0", "powersgd:rank must be a whole number of at least 1, but got 0."),
        ("powersgd:-1", "powersgd:rank must be a whole number of at least 1, but got -1."),
        ("powersgd:1.5", "compression 'powersgd':rank must be a whole number, but got '1.5'."),
        ("powersgd:²", "compression 'powersgd':rank must be a whole number, but got '²'."),
        ("powersgd:start=two", "compression 'powersgd':start must be a whole number, but got 'two'."),
        ("powersgd:start=-1", "powersgd:start must be a whole number of at least 0, but got -1."),
        ("powersgd:min_ratio=0", "powersgd:min_ratio must be greater than 0, but got 0.0."),
        ("powersgd:feedback=maybe", "compression 'powersgd':feedback must be true or false, but got 'maybe'."),
        ("topk:1.5", "topk:density must be greater than 0 and at most 1, but got 1.5."),
        ("topk:0", "topk:density must be greater than 0, but got 0.0."),
        ("topk:nan", "topk:density must be greater than 0, but got nan."),
        ("topk:many", "compression 'topk':density must be a number, but got 'many'."),
        ("topk:chnk=64", "unknown option of compression 'topk' 'chnk'. Did you mean 'chunk'?"),
        ("topk:chunk=-1", "topk:chunk must be a whole number of at least 0 and at most 2147483648, but got -1."),
        ("topk:bits=9", "topk:bits must be a whole number of at least 0 and at most 8, but got 9."),
        ("topk:decay=0", "topk:decay must be greater than 0, but got 0.0."),
        ("topk:decay=1.1", "topk:decay must be greater than 0 and at most 1, but got 1.1."),
        ("topk:decay=0.9,feedback=false", "topk:decay=0.9 is of the rest that feedback=false does not keep"),
        ("sign:decay=0.9", "unknown option of compression 'sign' 'decay'."),
        ("int8:0", "int8:block must be a whole number of at least 1, but got 0."),
        ("int8:6", "int8:block must be a multiple of 4, but got 6."),
        ("powersgd:4+fp61", "unknown dtype to send in 'fp61'. Did you mean 'fp16'? Allowed: bf16, fp16."),
        ("powersgd:4+topk", "unknown dtype to send in 'topk'. Allowed: bf16, fp16."),
        ("sign+fp16", "compression 'sign' sends nothing that +fp16 could shorten. It can be added to: powersgd, topk."),
        ("none+bf16", "compression 'none' sends nothing that +bf16 could shorten; for 16 bit alone write 'bf16'."),
    ],
)
def test_a_flag_that_cannot_be_honoured_says_why(flag, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_comm_hook(flag)


def test_sixteen_bit_is_added_to_what_sends_numbers():
    assert make_comm_hook("powersgd:2").send_dtype is None
    assert make_comm_hook("powersgd:2+fp16").send_dtype is torch.float16
    assert make_comm_hook("topk+bf16").send_dtype is torch.bfloat16


# --- what can't be compressed is told before any process starts


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class Sparse(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)


class Vectors(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Complex, "compression 'bf16' can't send the gradient of 'spectrum', which is torch.complex64"),
        (Sparse, "compression 'bf16' can't send the sparse gradient of 'words': set sparse=False there"),
    ],
)
def test_gradients_that_are_not_dense_reals(module, message):
    with pytest.raises(ValueError, match=message):
        engine(strategy="ddp_fork", devices=2, compression="bf16").fit(module(), rows())


def test_integers_that_are_not_trained_are_no_matter():
    module = Regression()
    module.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    make_comm_hook("int8").check(module)


def test_int8_keeps_what_it_rounds_off_only_where_that_is_asked_for():
    assert make_comm_hook("int8").memories() == {}
    assert make_comm_hook("int8:feedback=true").memories().keys() == {"residuals"}


def test_a_module_without_matrices_is_told_once():
    with pytest.warns(
        UserWarning, match="for no parameter of Vectors are factors .* all gradients are sent without compression"
    ):
        make_comm_hook("powersgd:1").check(Vectors())


def test_a_module_with_matrices_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_comm_hook("powersgd:1").check(Regression())
