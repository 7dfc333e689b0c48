"""The order of samples: the user's, dealt to the ranks, and the position of a run in it."""

from .batch_size import check_batch_sizes, check_loader
from .copied import copied
from .drawing import bring_to, state_of_seed
from .even_batches import EvenBatches, check_length, evaluated_order, even_batches_of, is_own
from .global_batches import GlobalBatches, InOneRow
from .global_order import GlobalOrder, Samples
from .length_bucketing import LengthBucketing
from .own_generators import OwnGenerators, set_own_states, states_of_own
from .packing import PackSequences, block_diagonal_mask, cu_seqlens
from .place import Pass, decides, order_of
from .replayed import digest_of_generators, loses_its_buffer, replayed
from .sample_seeds import SeededLoader, SeededSamples, check_seedable, seed_samples
from .shards import InShards, Shards, in_shards, left_of, why_not
from .stateful import (
    Remembering,
    as_stateful,
    epoch_of,
    is_stateful,
    keeps_place,
    remembering,
    set_epoch,
    told_by,
    would_begin,
)
from .stream_draws import drawing
from .streams import Agreeing, agreeing, check_own_part, shard_of
from .uneven import UNEVEN, Together, together
from .watched import Watched, WatchedLoaders
from .workers import WithWorkers, Workers, has_workers

__all__ = [
    "UNEVEN",
    "Agreeing",
    "EvenBatches",
    "GlobalBatches",
    "GlobalOrder",
    "InOneRow",
    "InShards",
    "LengthBucketing",
    "OwnGenerators",
    "PackSequences",
    "Pass",
    "Remembering",
    "Samples",
    "SeededLoader",
    "SeededSamples",
    "Shards",
    "Together",
    "Watched",
    "WatchedLoaders",
    "WithWorkers",
    "Workers",
    "agreeing",
    "as_stateful",
    "block_diagonal_mask",
    "bring_to",
    "check_batch_sizes",
    "check_length",
    "check_loader",
    "check_own_part",
    "check_seedable",
    "copied",
    "cu_seqlens",
    "decides",
    "digest_of_generators",
    "drawing",
    "epoch_of",
    "evaluated_order",
    "even_batches_of",
    "has_workers",
    "in_shards",
    "is_own",
    "is_stateful",
    "keeps_place",
    "left_of",
    "loses_its_buffer",
    "order_of",
    "remembering",
    "replayed",
    "seed_samples",
    "set_epoch",
    "set_own_states",
    "shard_of",
    "state_of_seed",
    "states_of_own",
    "together",
    "told_by",
    "why_not",
    "would_begin",
]
