"""One process: loaders stay as the user made them, in stock's order."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from polyphase.engine.data.stream_loader import StreamLoader
from tests.pairs import nightly

from ..tiny import Positions, Seen, Stream, engine

SEED = 1234
SIZE = 12


def by_class(value):
    return type(value).__name__ if isinstance(value, Sampler) else None


def run(loader, trainer_class=None, **flags):
    """The epochs of batches that were trained on, and the engine."""
    module = Seen()
    flags = {"max_epochs": 2, **flags}
    trainer = engine(**flags) if trainer_class is None else trainer_class(**QUIET, **flags)
    seed_everything(SEED, verbose=False)
    trainer.fit(module, loader)
    return module.epochs, trainer


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def order_in_one_process(sampler):
    """The first epoch of one process without a trainer."""
    torch.manual_seed(SEED)
    return [int(batch) for batch in DataLoader(Positions(SIZE), batch_size=1, sampler=sampler)]


LOADERS = {
    "in order": lambda **how: DataLoader(Positions(SIZE), 4, **how),
    "shuffled": lambda **how: DataLoader(Positions(SIZE), 4, shuffle=True, **how),
    "shuffled, the last batch smaller": lambda **how: DataLoader(Positions(SIZE), 5, shuffle=True, **how),
    "shuffled, drop_last": lambda **how: DataLoader(Positions(SIZE), 5, shuffle=True, drop_last=True, **how),
    "by a generator": lambda **how: DataLoader(Positions(SIZE), 4, shuffle=True, generator=generator(), **how),
    "by a generator, smaller": lambda **how: DataLoader(Positions(SIZE), 5, shuffle=True, generator=generator(), **how),
    "with replacement": lambda **how: of(RandomSampler(range(SIZE), True, 50, generator=generator()), **how),
    "weighted": lambda **how: of(WeightedRandomSampler([1.0, 3.0] * 6, SIZE), **how),
    "subset": lambda **how: of(SubsetRandomSampler(range(1, SIZE)), **how),
    "a class of the user's": lambda **how: of(Backwards(), **how),
    "without an end that is known": lambda **how: of(EndlessBackwards(), **how),
    "batches of a class of the user's": lambda **how: DataLoader(
        Positions(SIZE), batch_sampler=Pairs(RandomSampler(range(SIZE))), **how
    ),
    "torchdata's": lambda **how: StatefulDataLoader(Positions(SIZE), 4, shuffle=True, **how),
    "of a class of the user's": lambda **how: Prefixed("a", SIZE, **how),
}


def of(sampler, **how):
    return DataLoader(Positions(SIZE), batch_size=4, sampler=sampler, **how)


def generator():
    return torch.Generator().manual_seed(7)


WITH_A_WORKER = ["shuffled", "by a generator, smaller", "batches of a class of the user's", "torchdata's"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        *((name, 0) for name in LOADERS),
        *((name, 1) for name in WITH_A_WORKER),
        *nightly(*((name, 1) for name in LOADERS if name not in WITH_A_WORKER)),
    ],
)
def test_one_process_has_the_users_loader_and_stocks_order_and_random_numbers(name, num_workers):
    torch.manual_seed(SEED)  # torchdata's sampler draws when it is made
    expected, _ = run(LOADERS[name](num_workers=num_workers), Trainer)
    numbers = torch.get_rng_state()
    torch.manual_seed(SEED)
    loader = LOADERS[name](num_workers=num_workers)
    before = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    epochs, trainer = run(loader)
    assert epochs == expected
    assert torch.equal(torch.get_rng_state(), numbers)
    assert trainer.train_dataloader is loader
    assert {name: value for name, value in vars(loader).items() if name != "_iterator"} == before


def test_a_callback_can_change_the_size_of_the_users_batches():
    class Grows(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.train_dataloader.batch_sampler.batch_size = 3 + trainer.current_epoch

    def loader():
        return DataLoader(Positions(SIZE), 4, shuffle=True)

    expected, _ = run(loader(), Trainer, callbacks=[Grows()])
    assert run(loader(), callbacks=[Grows()])[0] == expected
    assert {len(batch) for batch in expected[1]} == {4}


def test_a_loader_in_order_stays_in_order_and_is_the_users_own():
    loader = DataLoader(Positions(SIZE), batch_size=4)
    epochs, trainer = run(loader)
    assert epochs == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]] * 2
    assert trainer.train_dataloader is loader


class Backwards(Sampler[int]):
    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(range(SIZE - 1, -1, -1))


class EndlessBackwards(Backwards):
    """As a map-style dataset allows: its length is known only at the end."""

    __len__ = None


@pytest.mark.parametrize(
    "sampler",
    [
        EndlessBackwards(),
        SequentialSampler(range(SIZE)),
        DistributedSampler(Positions(SIZE), num_replicas=1, rank=0),
    ],
    ids=by_class,
)
def test_what_needs_no_seed_or_has_no_length_is_left_alone(sampler):
    loader = DataLoader(Positions(SIZE), batch_size=4, sampler=sampler)
    _, trainer = run(loader)
    assert trainer.train_dataloader is loader
    assert trainer.train_dataloader.sampler is sampler


@pytest.mark.parametrize("shuffle", [False, True])
def test_use_distributed_sampler_false_leaves_every_loader_alone(shuffle):
    loader = DataLoader(Positions(SIZE), batch_size=4, shuffle=shuffle)
    _, trainer = run(loader, use_distributed_sampler=False)
    assert trainer.train_dataloader is loader


def test_an_iterable_dataset_gets_a_loader_that_knows_its_place():
    loader = DataLoader(Stream(SIZE), batch_size=4)
    epochs, trainer = run(loader)
    assert epochs == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]] * 2
    assert isinstance(trainer.train_dataloader, StreamLoader)
    assert trainer.train_dataloader.dataset is loader.dataset


class Batches:
    """Any iterable of batches."""

    def __iter__(self):
        return iter([torch.tensor([1, 2]), torch.tensor([3])])


def test_what_is_no_dataloader_is_left_alone():
    batches = Batches()
    epochs, trainer = run(batches)
    assert epochs == [[[1, 2], [3]]] * 2
    assert trainer.train_dataloader is batches


class Prefixed(DataLoader):
    """Has a constructor that can't be called again with DataLoader's arguments alone."""

    def __init__(self, prefix, size, **how):
        super().__init__(Positions(size), batch_size=4, shuffle=True, **how)
        self.prefix = prefix


class Pairs(BatchSampler):
    """A batch sampler of the user's: batches of two, whatever else."""

    def __init__(self, sampler, batch_size=2, drop_last=False):
        super().__init__(sampler, 2, drop_last)


def test_single_samples_without_batches_come_in_stocks_order():
    def seen(trainer):
        module = Seen()
        module.training_step = lambda batch, batch_idx: module.epochs[-1].append(int(batch)) or module.weight * 1.0
        seed_everything(SEED, verbose=False)
        trainer.fit(module, DataLoader(Positions(SIZE), batch_size=None, shuffle=True))
        return module.epochs

    assert seen(engine(max_epochs=2)) == seen(Trainer(max_epochs=2, **QUIET))


def test_each_of_several_loaders_has_stocks_order():
    class Both(Seen):
        def training_step(self, batch, batch_idx):
            self.epochs[-1].append({name: part.tolist() for name, part in batch.items()})
            return self.weight * 1.0

    def seen(trainer):
        module = Both()
        seed_everything(SEED, verbose=False)
        longer, shorter = DataLoader(Positions(SIZE), 2, shuffle=True), DataLoader(Positions(5), 2, shuffle=True)
        trainer.fit(module, {"longer": longer, "shorter": shorter})
        return module.epochs

    assert seen(engine(max_epochs=2)) == seen(Trainer(max_epochs=2, **QUIET))


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.filterwarnings("ignore:Your `.*_dataloader`'s sampler has shuffling enabled")
def test_evaluation_sees_each_sample_once(stage):
    class Evaluated(Seen):
        def validation_step(self, batch, batch_idx):
            self.epochs.append(batch.tolist())

        test_step = validation_step

    for shuffle in (False, True):
        module = Evaluated()
        getattr(engine(), stage)(module, DataLoader(Positions(13), batch_size=4, shuffle=shuffle), verbose=False)
        assert sorted(i for batch in module.epochs for i in batch) == list(range(13))


def test_one_process_evaluates_with_the_users_own_loader():
    class Evaluated(Seen):
        def validation_step(self, batch, batch_idx):
            pass

    for loader in (DataLoader(Positions(13), batch_size=4), DataLoader(Stream(3))):
        trainer = engine()
        trainer.validate(Evaluated(), loader, verbose=False)
        assert trainer.val_dataloaders is loader
        assert trainer.validate_loop._padding is None


def test_prediction_keeps_the_order():
    class Predicts(Seen):
        def predict_step(self, batch, batch_idx):
            return batch.tolist()

    assert engine().predict(Predicts(), DataLoader(Positions(5), batch_size=2)) == [[0, 1], [2, 3], [4]]


class Reversed(DataLoader):
    """Has a constructor that can't be called again with its own attributes."""

    def __init__(self, size):
        super().__init__(Positions(size), 2, sampler=range(size - 1, -1, -1))


HOOKS = {
    "by position": lambda: DataLoader(Positions(5), 2, False, None, None, 0, None, False, True),
    "of a class of the user's": lambda: Reversed(5),
    "by a batch sampler": lambda: DataLoader(Positions(5), batch_sampler=BatchSampler(range(4, -1, -1), 2, True)),
}


@pytest.mark.parametrize("made", HOOKS)
@pytest.mark.parametrize("strategy", ["single", "ddp_fork"])
@pytest.mark.filterwarnings("ignore:Your `.*_dataloader`'s sampler has shuffling enabled")
def test_a_loader_that_a_hook_makes_is_used_however_its_arguments_are_given(made, strategy):
    class Makes(Seen):
        def validation_step(self, batch, batch_idx):
            self.epochs.append(batch.tolist())

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return batch.tolist()

        def made(self):
            return HOOKS[made]()

        val_dataloader = test_dataloader = predict_dataloader = made

    batches = [[0, 1], [2, 3], [4]] if made == "by position" else [[4, 3], [2, 1], [0]]
    trainer = engine(strategy=strategy)
    assert trainer.predict(Makes()) == batches  # also what drop_last leaves out of an evaluation
    module = Makes()
    for stage in (trainer.validate, trainer.test):
        stage(module, verbose=False)
    assert strategy != "single" or module.epochs == 2 * batches[: None if made.startswith("of") else 2]
