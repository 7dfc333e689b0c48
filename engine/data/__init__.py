"""Splits the user's order of samples over the ranks, and tracks the position of a run in this order."""

from .clone_loader import clone_loader
from .drawing import draws_at_once, restore_sampler
from .epoch_position import EpochPosition, Watched, WatchedLoaders, controlling_sampler, order_of, tell_batch_sampler
from .even_batches import EvalBatchSampler, check_length, evaluated_order, even_batches_of, is_custom
from .exhausted import ExhaustedIteratorError, ends_with_data, naming_exhausted_iterators
from .global_order import FlattenedBatchSampler, GlobalBatches, GlobalOrder, Samples
from .length_bucketing import LengthBucketing
from .own_generators import OwnGenerators, set_own_states, states_of_own
from .packing import PackSequences, block_diagonal_mask, cu_seqlens
from .sample_seeds import SeededLoader, SeededSamples, check_seedable, seed_samples
from .shards import (
    ShardedLoader,
    ShardedStream,
    digest_of_generators,
    loses_its_buffer,
    read_by_shards,
    remaining_shards,
    reread_if_buffered,
    why_not_shardable,
)
from .stateful import (
    KeptStates,
    StateTrackingLoader,
    as_stateful,
    epoch_of,
    epoch_setter,
    is_litdata_loader,
    is_stateful,
    set_epoch,
    starts_iterator,
    track_states,
    tracks_own_position,
)
from .streams import (
    UnevenEvalLoader,
    as_uneven_eval,
    check_made_for,
    check_not_read_whole,
    check_own_part,
    check_script_makes_none,
    naming_foreign_ranks,
    shard_of,
)
from .uneven import UNEVEN, UnevenTrainLoader, as_uneven_train, check_evaluated_side_by_side, check_trained_side_by_side
from .workers import WithWorkers, Workers, has_workers, track_draws

__all__ = [
    "UNEVEN",
    "EpochPosition",
    "EvalBatchSampler",
    "ExhaustedIteratorError",
    "FlattenedBatchSampler",
    "GlobalBatches",
    "GlobalOrder",
    "KeptStates",
    "LengthBucketing",
    "OwnGenerators",
    "PackSequences",
    "Samples",
    "SeededLoader",
    "SeededSamples",
    "ShardedLoader",
    "ShardedStream",
    "StateTrackingLoader",
    "UnevenEvalLoader",
    "UnevenTrainLoader",
    "Watched",
    "WatchedLoaders",
    "WithWorkers",
    "Workers",
    "as_stateful",
    "as_uneven_eval",
    "as_uneven_train",
    "block_diagonal_mask",
    "check_evaluated_side_by_side",
    "check_length",
    "check_made_for",
    "check_not_read_whole",
    "check_own_part",
    "check_script_makes_none",
    "check_seedable",
    "check_trained_side_by_side",
    "clone_loader",
    "controlling_sampler",
    "cu_seqlens",
    "digest_of_generators",
    "draws_at_once",
    "ends_with_data",
    "epoch_of",
    "epoch_setter",
    "evaluated_order",
    "even_batches_of",
    "has_workers",
    "is_custom",
    "is_litdata_loader",
    "is_stateful",
    "loses_its_buffer",
    "naming_exhausted_iterators",
    "naming_foreign_ranks",
    "order_of",
    "read_by_shards",
    "remaining_shards",
    "reread_if_buffered",
    "restore_sampler",
    "seed_samples",
    "set_epoch",
    "set_own_states",
    "shard_of",
    "starts_iterator",
    "states_of_own",
    "tell_batch_sampler",
    "track_draws",
    "track_states",
    "tracks_own_position",
    "why_not_shardable",
]
