"""What to do about errors that everybody meets: each message, as it really is, has its own remedy; reports."""

import json
import os
from pathlib import Path

import pytest

from polyphase.engine.reliability.report import Report, what_to_do

MESSAGES = {
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB": "fsdp",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory:": "fsdp",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "fsdp",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers"
    " are out of shared memory. Please try to raise your shared memory limit.": "--shm-size",
    "RuntimeError: unable to write to file </torch_42_1234_0>: No space left on device (28)": "--shm-size",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ": "oom",
    "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly": "oom",
    "OSError: [Errno 24] Too many open files: '/data/1.npy'": "ulimit -n",
    "RuntimeError: received 0 items of ancdata": "ulimit -n",
    "OSError: [Errno 28] No space left on device": "default_root_dir",
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6:"
    " false, code: -98, name: EADDRINUSE, message: address already in use": "MASTER_PORT",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27": "NCCL_DEBUG",
    "DistBackendError: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000": "CUDA_VISIBLE_DEVICES",
    "AcceleratorError: CUDA error: device-side assert triggered": "CUDA_LAUNCH_BLOCKING",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "nvidia-smi",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the"
    " 'spawn' start method": "restart the kernel",
    "RuntimeError: Unable to handle autograd's threading in combination with fork-based multiprocessing. See"
    " https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork": "restart the kernel",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices": "register_buffer",
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new": "find_unused",
    "AttributeError: Can't pickle local object 'main.<locals>.Data'": "ddp_fork",
    "AttributeError: Can't get local object 'main.<locals>.Data'": "ddp_fork",
    "gaierror: [Errno -2] Name or service not known": "/etc/hosts",
    "RuntimeError: Connection refused": "firewall",
    "RuntimeError: [enforce fail] Timed out waiting 1800000ms for recv operation to complete": "`collectives`",
    "DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0": "`collectives`",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_has_its_remedy(message):
    assert MESSAGES[message] in what_to_do({"kind": "exception", "message": message})


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: this rank has had enough",
        "ReadTimeout: HTTPSConnectionPool(host='api.wandb.ai', port=443): Read timed out. (read timeout=10)",
        "ConnectionError: HTTPConnectionPool(host='mlflow', port=80): Connection refused",
        "OutOfResources: out of resource: shared memory, Required: 180224, Hardware limit: 166912.",
    ],
)
def test_others_have_none(message):
    assert what_to_do({"kind": "exception", "message": message}) is None


@pytest.mark.parametrize(("kind", "advice"), [("death", "oom"), ("hang", "`ranks`"), ("lost host", "doctor host")])
def test_failures_without_a_message_go_by_their_kind(kind, advice):
    assert advice in what_to_do({"kind": kind, "message": "its process has ended without an error message"})


def test_a_report_is_not_moved_into_the_folder_of_a_link(tmp_path):
    failure = {"rank": 0, "by": 0, "kind": "exception", "message": "RuntimeError: x"}
    report = Report(str(tmp_path / "failures"), failure, {}, None)
    (tmp_path / "failures").mkdir()
    (tmp_path / "other").mkdir()
    os.symlink(tmp_path / "other", report.where)
    assert json.loads(Path(report.write()).read_text())["kind"] == "exception"
    assert not os.path.islink(report.where)
    assert os.listdir(tmp_path / "other") == []
