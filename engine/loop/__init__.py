"""The engine's loops: the hot path, and other changes to Lightning's loops; uses private names of Lightning 2.6."""

from ..loggers.run_names import claim_log_folders, folders_written_to
from ..reliability.nonfinite import NonFiniteError, NonFiniteWatch
from ..resume import from_checkpoint  # noqa: F401 - makes load_from_checkpoint open directories
from .compile import CompileSteps, check_cuda_graphs, compile_mode
from .fit import NothingTrainedError
from .install import TrainerBase, defaults_from_environment, install_loops
from .noise import quiet
from .runs import check_callbacks, check_manual_optimization, reports_uncaught

__all__ = [
    "CompileSteps",
    "NonFiniteError",
    "NonFiniteWatch",
    "NothingTrainedError",
    "TrainerBase",
    "check_callbacks",
    "check_cuda_graphs",
    "check_manual_optimization",
    "claim_log_folders",
    "compile_mode",
    "defaults_from_environment",
    "folders_written_to",
    "install_loops",
    "quiet",
    "reports_uncaught",
]
