"""Private classes and functions of Lightning 2.6; `import lightning.pytorch` has imported all their modules already."""

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.device_parser import _select_auto_accelerator
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.core.optimizer import _configure_optimizers, _MockOptimizer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector, _parse_num_batches
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _METRICS,
    _get_default_dtype,
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.argparse import _parse_env_variables
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from lightning.pytorch.utilities.data import _dataloader_init_kwargs_resolve_sampler
from lightning.pytorch.utilities.exceptions import _TunerExitException

__all__ = [
    "_METRICS",
    "_AutomaticOptimization",
    "_CallbackConnector",
    "_CheckpointConnector",
    "_ChildProcessObserver",
    "_DataConnector",
    "_DataFetcher",
    "_DataLoaderIterDataFetcher",
    "_DatasetSamplerWrapper",
    "_EvaluationLoop",
    "_FitLoop",
    "_IndexBatchSamplerWrapper",
    "_LoggerConnector",
    "_ManualOptimization",
    "_MaxSizeCycle",
    "_Metadata",
    "_MockOptimizer",
    "_MultiProcessingLauncher",
    "_PredictionLoop",
    "_PrefetchDataFetcher",
    "_ResultCollection",
    "_ResultMetric",
    "_SignalConnector",
    "_SubprocessScriptLauncher",
    "_Sync",
    "_TrainingEpochLoop",
    "_TunerExitException",
    "_auto_add_worker_init_fn",
    "_configure_optimizers",
    "_convert_params",
    "_dataloader_init_kwargs_resolve_sampler",
    "_flatten_dict",
    "_get_default_dtype",
    "_parse_env_variables",
    "_parse_num_batches",
    "_select_auto_accelerator",
    "_update_properties",
]
