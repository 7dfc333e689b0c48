"""Private attributes of Lightning's and torch's objects that the engine reads, replaces or overrides, by their owners.

Where the code uses one, a comment names it. Names that the standard library documents, such as `sys._getframe` and
the methods of named tuples, are not listed.
"""

from collections.abc import Mapping

__all__ = ["ATTRIBUTES", "OPTIONAL"]

_TRAINER = "lightning.pytorch.trainer"
_LOOPS = "lightning.pytorch.loops"
_LOGGERS = "lightning.pytorch.loggers"
_CONNECTORS = f"{_TRAINER}.connectors"
_FSDP = "torch.distributed.fsdp._fully_shard"

ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    # --- Lightning
    f"{_TRAINER}.trainer:Trainer": (
        "_accelerator_connector",
        "_callback_connector",
        "_checkpoint_connector",
        "_data_connector",
        "_logger_connector",
        "_signal_connector",
    ),
    f"{_TRAINER}.trainer": ("_log_hyperparams",),
    f"{_TRAINER}.setup": ("_val_check_time_interval",),
    f"{_TRAINER}.call": (
        "_call_callback_hooks",
        "_call_lightning_module_hook",
        "_call_strategy_hook",
        "_call_teardown_hook",
        "_interrupt",
    ),
    f"{_CONNECTORS}.accelerator_connector": ("_IS_INTERACTIVE",),
    f"{_CONNECTORS}.accelerator_connector:_AcceleratorConnector": ("_parallel_devices",),
    f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector": (
        "_callback_metrics",
        "_current_fx",
        "_logged_metrics",
        "_progress_bar_metrics",
    ),
    f"{_CONNECTORS}.logger_connector.result:_ResultCollection": ("_extract_batch_size", "_forked_name", "_get_cache"),
    f"{_CONNECTORS}.signal_connector:_SignalConnector": ("_has_already_handler", "_register_signal"),
    f"{_LOOPS}.fit_loop:_FitLoop": (
        "_combined_loader_states_to_load",
        "_data_source",
    ),
    f"{_LOOPS}.evaluation_loop:_EvaluationLoop": (
        "_max_batches",
        "_results",
        "_seen_batches_per_dataloader",
    ),
    f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop": (
        "_batches_that_stepped",
        "_build_kwargs",
        "_is_training_done",
        "_num_ready_batches_reached",
        "_restarting",
        "_save_loggers_on_train_batch_end",
        "_warning_cache",
    ),
    f"{_LOOPS}.loop:_Loop": ("_loaded_from_state_dict", "_resuming_from_checkpoint"),
    f"{_LOOPS}.prediction_loop:_PredictionLoop": ("_build_step_args_from_hook_kwargs",),
    f"{_LOOPS}.optimization.automatic:_AutomaticOptimization": ("_skip_backward",),
    f"{_LOOPS}.fetchers:_DataFetcher": ("_start_profiler", "_stop_profiler"),
    "lightning.pytorch.core.module:LightningModule": ("_current_fx_name", "_on_before_batch_transfer"),
    "lightning.pytorch.core.optimizer": ("_validate_multiple_optimizers_support",),
    "lightning.pytorch.core.optimizer:LightningOptimizer": ("_on_after_step", "_on_before_step"),
    "lightning.pytorch.core.saving": ("_ALLOWED_INSTANTIATORS", "_default_map_location"),
    "lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper": ("_batch_sampler",),
    "lightning.pytorch.utilities.combined_loader:CombinedLoader": ("_iterables",),
    "lightning.pytorch.utilities.combined_loader:_MaxSizeCycle": ("_consumed", "_idx"),
    "lightning.pytorch.plugins.precision:Precision": ("_clip_gradients",),
    "lightning.pytorch.strategies:Strategy": ("_lightning_optimizers",),
    "lightning.pytorch.strategies:DDPStrategy": ("_ddp_kwargs", "_layer_sync", "_timeout"),
    "lightning.pytorch.strategies:SingleDeviceStrategy": ("_root_device",),
    "lightning.fabric.strategies:Strategy": ("_checkpoint_io",),
    "lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher": ("_start_method",),
    "lightning.fabric.strategies.launchers.subprocess_script:_ChildProcessObserver": (
        "_child_processes",
        "_terminate_all",
    ),
    "lightning.fabric.plugins.environments:LightningEnvironment": ("_main_port",),
    "lightning.pytorch.strategies.launchers.multiprocessing": ("_check_bad_cuda_fork",),
    "lightning.pytorch.callbacks:StochasticWeightAveraging": (
        "_average_model",
        "_init_n_averaged",
        "_initialized",
        "_scheduler_state",
    ),
    "lightning.pytorch.callbacks:WeightAveraging": (
        "_average_model",
        "_latest_update_step",
        "_swap_models",
    ),
    f"{_LOGGERS}:CSVLogger": ("_experiment", "_fs"),
    f"{_LOGGERS}:TensorBoardLogger": ("_sanitize_params",),
    f"{_LOGGERS}:MLFlowLogger": ("_experiment_name", "_mlflow_client", "_run_id", "_tracking_uri"),
    f"{_LOGGERS}:WandbLogger": ("_id", "_wandb_init"),
    # --- torchmetrics
    "torchmetrics:Metric": ("_computed", "_forward_cache", "_reductions", "_update_count"),
    # --- torch
    "torch": (
        "_C",
        "_TorchCompileInductorWrapper",
        "_amp_foreach_non_finite_check_and_unscale_",
        "_dynamo",
        "_foreach_copy_",
        "_foreach_mul_",
        "_foreach_norm",
        "_functorch",
        "_has_compatible_shallow_copy_type",
    ),
    "torch._C": ("_current_graph_task_id", "_disabled_torch_function_impl"),
    "torch:Tensor": ("_backward_hooks", "_base", "_is_view", "_make_wrapper_subclass", "_post_accumulate_grad_hooks"),
    "torch:UntypedStorage": ("_cdata",),
    "torch._ops:OpOverload": ("_schema",),
    "torch.ops.aten": (
        "_local_scalar_dense",
        "_log_softmax",
        "_prelu_kernel_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_mm",
        "_to_copy",
        "_unsafe_view",
    ),
    "torch.cuda.memory": ("_dump_snapshot", "_record_memory_history"),
    "torch.distributed.tensor.experimental._context_parallel._attention": (
        "_RotateMethod",
        "_cp_options",
        "_templated_ring_attention",
        "_templated_ring_attention_backward",
    ),
    "torch.nn.attention.flex_attention": ("_validate_embed_dim",),
    "torch.utils.checkpoint": ("_checkpoint_without_reentrant_generator",),
    "torch.utils.tensorboard:SummaryWriter": ("_get_file_writer",),
    "torch.amp:GradScaler": ("_per_optimizer_states",),
    "torch.autograd": ("_get_sequence_nr",),
    "torch.autograd.graph:Node": ("_sequence_nr",),
    "torch.autograd:Variable": ("_execution_engine",),
    "torch.overrides": ("_get_current_function_mode",),
    "torch.nn:Module": (
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_non_persistent_buffers_set",
    ),
    "torch.nn.modules.module": (
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
    ),
    "torch.nn.attention.varlen": ("_varlen_attn",),
    "torch.nn.modules.linear_cross_entropy": ("_linear_cross_entropy_batch_chunked",),
    "torch.nn:BatchNorm1d": ("_check_input_dim",),
    "torch.nn:Conv1d": ("_conv_forward",),
    "torch.nn.functional": ("_in_projection", "_in_projection_packed"),
    "torch.nn.parallel:DistributedDataParallel": ("_comm_hooks", "_has_rebuilt_buckets"),
    "torch.distributed:Reducer": ("_rebuild_buckets", "_reset_state"),
    "torch.optim.lr_scheduler": ("_opt_called",),
    "torch.optim._muon": ("_adjust_lr", "_single_tensor_muon", "_zeropower_via_newtonschulz"),
    "torch.optim:Optimizer": ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
    "torch.utils.data:DataLoader": ("_auto_collation", "_dataset_kind"),
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": (
        "_get_data",
        "_num_workers",
        "_shutdown",
        "_shutdown_workers",
    ),
    "torch.utils.data.dataloader:_SingleProcessDataLoaderIter": ("_dataset_fetcher",),
    "torch.utils.data._utils.worker": ("_worker_info",),
    "torch.distributed.distributed_c10d": (
        "_abort_process_group",
        "_get_default_store",
        "_rank_not_in_group",
        "_world",
    ),
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent": ("_exit_barrier",),
    "torch.distributed.elastic.multiprocessing.api:SubprocessContext": (
        "_capture_process_failures",
        "_running_local_ranks",
    ),
    "torch.distributed._functional_collectives": ("_resolve_group",),
    "torch.distributed:ProcessGroup": ("_get_sequence_number_for_group",),
    "torch.distributed.rpc.internal": ("_InternalRPCPickler", "_unpickler"),
    "torch.distributed.rpc.internal:_InternalRPCPickler": ("_tensor_receiver",),
    "torch.distributed.tensor:DTensor": ("_local_tensor", "_op_dispatcher", "_spec"),
    "torch.distributed.tensor._dispatch:OpDispatcher": (
        "_custom_op_handlers",
        "_dispatch_get_local_results_slow_path",
        "_random_ops",
    ),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "torch.distributed._composable_state": ("_module_state_mapping",),
    f"{_FSDP}._fsdp_state:FSDPState": ("_fsdp_param_groups", "_pre_backward", "_root_post_backward_final_callback"),
    f"{_FSDP}._fsdp_param_group:FSDPParamGroup": (
        "_all_gather_comm",
        "_all_gather_process_group",
        "_register_post_backward_hook",
        "_to_sharded",
    ),
    f"{_FSDP}._fsdp_param:FSDPParam": (
        "_contiguous_orig_stride",
        "_module_info",
        "_orig_size",
        "_param_fqn",
        "_sharded_param_data",
        "_unsharded_param",
    ),
}
"""Names by ``module`` or ``module:class``."""

OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "datasets.iterable_dataset:IterableDataset": ("_distributed", "_ex_iterable", "_formatting"),
    "streaming:StreamingDataset": ("_parallel_rank_world",),
    "torchdata.stateful_dataloader.stateful_dataloader": ("_StatefulMultiProcessingDataLoaderIter",),
}
"""The same for optional packages."""
