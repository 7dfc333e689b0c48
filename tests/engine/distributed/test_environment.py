"""Sizes from the launcher's environment: taken where the flags are silent, compared where they speak."""

import os
import socket

import psutil
import pytest
import torch

from polyphase.engine.distributed.environment import (
    _launched_sizes,
    child_environment,
    global_seed,
    job_secret,
    launcher_name,
    listen_on_loopback,
    listen_towards,
    resolve_sizes,
)

from ..tiny import QUIET, Engine

AUTO = ("auto", -1, "-1")
"""Ways of leaving `devices` to the launcher."""


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    """No launcher, whatever started the tests."""
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_", "PL_")) or name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    # Lightning warns where `srun` is installed and was not used.
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def launch(monkeypatch):
    """Sets what a launcher sets: the number of processes on this node, and of nodes."""

    def set_(launcher: str, per_node: int, num_nodes: int) -> None:
        if launcher == "torchrun":
            values = {
                "TORCHELASTIC_RUN_ID": "none",
                "LOCAL_WORLD_SIZE": per_node,
                "WORLD_SIZE": per_node * num_nodes,
                "RANK": 0,
                "LOCAL_RANK": 0,
                "GROUP_RANK": 0,
            }
        else:
            values = {"SLURM_NTASKS": per_node * num_nodes, "SLURM_NNODES": num_nodes, "SLURM_JOB_NAME": "train"}
            values |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), 0)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_


def test_processes_that_are_started_share_a_secret(monkeypatch):
    name = "POLYPHASE_JOB_SECRET"
    monkeypatch.delenv(name, raising=False)
    with child_environment(num_nodes=2):  # which the other machine's processes would not have
        assert name not in os.environ
    with child_environment(num_nodes=1):
        assert len(bytes.fromhex(os.environ[name])) == 32
    assert name not in os.environ
    monkeypatch.setenv(name, "the user's")
    with child_environment(num_nodes=1):
        assert os.environ[name] == "the user's"


def test_without_a_launcher_the_flags_are_as_given():
    assert launcher_name() is None
    assert _launched_sizes() is None
    for devices in (*AUTO, 2, [0, 1], "2"):
        assert resolve_sizes(devices, 3) == (devices, 3)


@pytest.mark.parametrize(("per_node", "num_nodes"), [(2, 1), (4, 2), (1, 3)])
@pytest.mark.parametrize("launcher", ["torchrun", "SLURM"])
class TestLaunched:
    def test_the_sizes_are_the_launchers(self, launch, launcher, per_node, num_nodes):
        launch(launcher, per_node, num_nodes)
        assert launcher_name() == launcher
        assert _launched_sizes() == (per_node * num_nodes, per_node)

    def test_flags_left_out_are_completed(self, launch, launcher, per_node, num_nodes):
        launch(launcher, per_node, num_nodes)
        for devices in AUTO:
            assert resolve_sizes(devices, 1) == (per_node, num_nodes)

    def test_flags_that_agree_are_kept(self, launch, launcher, per_node, num_nodes):
        launch(launcher, per_node, num_nodes)
        listed = ",".join(map(str, range(per_node))) + ","
        for devices in (per_node, str(per_node), list(range(per_node)), tuple(range(per_node)), listed):
            assert resolve_sizes(devices, num_nodes) == (devices, num_nodes)

    def test_devices_that_contradict_are_an_error(self, launch, launcher, per_node, num_nodes):
        launch(launcher, per_node, num_nodes)
        expected = rf"{launcher} started {num_nodes} node\(s\) x {per_node} process\(es\).*devices={per_node}\."
        for devices in (per_node + 1, str(per_node + 1), list(range(per_node + 1)), 0):
            with pytest.raises(ValueError, match=expected):
                resolve_sizes(devices, 1)

    def test_nodes_that_contradict_are_an_error(self, launch, launcher, per_node, num_nodes):
        launch(launcher, per_node, num_nodes)
        with pytest.raises(ValueError, match=f"num_nodes={num_nodes + 1} and devices='auto'.*num_nodes={num_nodes},"):
            resolve_sizes("auto", num_nodes + 1)


@pytest.mark.parametrize("devices", [-2, "many", 1.5, None])
def test_devices_that_mean_nothing_are_not_taken_for_auto(launch, devices):
    launch("torchrun", 2, 1)
    with pytest.raises(ValueError, match="devices"):
        resolve_sizes(devices, 1)


def test_slurms_older_name_for_the_number_of_nodes(launch, monkeypatch):
    launch("SLURM", 2, 2)
    monkeypatch.delenv("SLURM_NNODES")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert _launched_sizes() == (4, 2)


def test_an_interactive_slurm_allocation_has_started_nobody(launch, monkeypatch):
    launch("SLURM", 4, 1)
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert launcher_name() is None
    assert resolve_sizes(1, 1) == (1, 1)


def test_one_slurm_task_is_no_launch(launch):
    launch("SLURM", 1, 1)
    assert launcher_name() is None
    assert resolve_sizes(2, 1) == (2, 1)


def test_torchrun_inside_a_slurm_job_comes_first(launch):
    launch("SLURM", 8, 2)
    launch("torchrun", 2, 1)
    assert launcher_name() == "torchrun"
    assert _launched_sizes() == (2, 2)


@pytest.mark.parametrize(("launcher", "total"), [("torchrun", "WORLD_SIZE"), ("SLURM", "SLURM_NTASKS")])
def test_nodes_of_unequal_size_are_not_rounded_down(launch, monkeypatch, launcher, total):
    launch(launcher, 2, 2)
    monkeypatch.setenv(total, "5")
    with pytest.raises(ValueError, match="5"):
        resolve_sizes("auto", 1)


@pytest.mark.parametrize("num_nodes", [0, -1, 1.5, "1", True])
def test_the_number_of_nodes_is_a_count(num_nodes):
    with pytest.raises(ValueError, match="num_nodes must be a whole number of at least 1"):
        resolve_sizes("auto", num_nodes)


def test_the_engine_takes_its_size_from_torchrun(launch):
    launch("torchrun", 2, 2)
    engine = Engine(**QUIET, strategy="ddp")
    assert (engine.num_devices, engine.num_nodes, engine.layout.replicate) == (2, 2, 4)


def test_the_engine_refuses_flags_that_contradict_torchrun(launch):
    launch("torchrun", 2, 1)
    with pytest.raises(ValueError, match=r"torchrun started 1 node\(s\) x 2 process\(es\)"):
        Engine(**QUIET, strategy="ddp", devices=4)


def test_under_torchrun_a_launchers_suffix_starts_no_workers(launch):
    forks = Engine(**QUIET, strategy="ddp_fork", devices=2).strategy.launcher
    launch("torchrun", 2, 1)
    runs_the_script = Engine(**QUIET, strategy="ddp_fork").strategy.launcher
    assert forks.is_interactive_compatible
    assert not runs_the_script.is_interactive_compatible


def test_the_seed_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1234")
    assert global_seed() == 1234


def test_without_seed_everything_the_seed_is_torchs():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        torch.rand(3)  # drawing does not change it
        assert global_seed() == 77


def test_trainers_own_variables_reach_the_engine(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_ACCUMULATE_GRAD_BATCHES", "3")
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    engine = Engine(**QUIET)
    assert (engine.accumulate_grad_batches, engine.max_steps) == (3, 7)
    assert Engine(**QUIET, max_steps=5).max_steps == 5, "what is written in the script comes first"


def test_slurm_without_its_number_of_nodes_leaves_them_to_the_flags(launch, monkeypatch):
    launch("SLURM", 2, 2)
    monkeypatch.delenv("SLURM_NNODES")
    assert resolve_sizes([1, 2], 2) == ([1, 2], 2)
    assert resolve_sizes("auto", 2) == (2, 2)
    with pytest.raises(ValueError, match=r"SLURM started 4 node\(s\) x 1 process\(es\)"):
        resolve_sizes(2, 4)


def test_gloo_listens_where_the_other_machines_are(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    by_name = {name: {a.address for a in entries} for name, entries in psutil.net_if_addrs().items()}
    outward = [a for each in by_name.values() for a in each if a.count(".") == 3 and not a.startswith("127.")]
    # This machine's name may stand for an address of loopback, at which no other one finds it.
    for address in ("127.0.0.1", socket.gethostname(), *outward):
        listen_towards(address)
        name = os.environ.pop("GLOO_SOCKET_IFNAME", None)
        assert name is None or not any(a.startswith("127.") for a in by_name[name])
        assert address not in outward or address in by_name[name]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    listen_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("listen", [listen_on_loopback, lambda: listen_towards("127.0.0.1")])
@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there(monkeypatch, name, listen):
    monkeypatch.setenv(name, "lo,none0")
    with pytest.raises(ValueError, match=f"{name}='lo,none0' names none0, but the network interfaces .* are .*lo"):
        listen()


def test_a_default_that_can_not_be_is_told_with_its_variable(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "x")
    with pytest.raises(ValueError, match="max_steps='x'") as caught:
        Engine(**QUIET)
    assert caught.value.__notes__[-1] == "Environment: PL_TRAINER_MAX_STEPS=x"


def test_a_secret_may_have_any_bytes(monkeypatch):
    monkeypatch.setenv("POLYPHASE_JOB_SECRET", "\udcff\udcfe")
    assert job_secret() == b"\xff\xfe"
