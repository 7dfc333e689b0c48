"""Launchers that Lightning does not know: their processes are one run, or refused by name."""

import os
import re
import sys

import pytest
from lightning.fabric.plugins.environments import KubeflowEnvironment

from polyphase.engine.distributed.environment import (
    LaunchedEnvironment,
    _launched_sizes,
    launcher_name,
    rank_variables,
    resolve_sizes,
)
from tests.distributed import run_command

from ..tiny import QUIET, Engine

NAMES = {
    "Open MPI": [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
    "MVAPICH": [f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
    "mpiexec": ["PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "LSF": [f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
    "RANK and WORLD_SIZE": ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
}
"""Each launcher's variables: processes, number of this one, the same on this machine. From their manuals."""

MEETING = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29501"}


@pytest.fixture
def set_variables(monkeypatch):
    """Sets variables, and no others that a launcher might have set."""
    mine = ("SLURM_", "TORCHELASTIC_", "PET_", "MASTER_", "LSB_", *(name for names in NAMES.values() for name in names))
    for name in os.environ:
        if name.startswith(mine):
            monkeypatch.delenv(name)

    def set_(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_


@pytest.mark.parametrize("launcher", NAMES)
def test_its_processes_are_one_run(set_variables, launcher):
    set_variables(dict(zip(NAMES[launcher], (6, 4, 1, 3), strict=True)) | MEETING)
    engine = Engine(**QUIET, strategy="ddp")
    environment = engine.strategy.cluster_environment
    assert (launcher_name(), engine.num_devices, engine.num_nodes, engine.world_size) == (launcher, 3, 2, 6)
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (4, 1, 1)
    assert (environment.main_address, environment.main_port) == ("10.0.0.7", 29501)
    assert environment.creates_processes_externally


@pytest.mark.parametrize("launcher", NAMES)
def test_one_process_is_no_launch(set_variables, launcher):
    set_variables(dict(zip(NAMES[launcher], (1, 0, 0, 1), strict=True)) | MEETING)
    assert launcher_name() is None
    assert resolve_sizes(2, 1) == (2, 1)


def test_a_process_for_each_pod(set_variables):
    set_variables({"RANK": 1, "WORLD_SIZE": 3} | MEETING)
    engine = Engine(**QUIET, strategy="ddp")
    assert (engine.num_devices, engine.num_nodes) == (1, 3)
    assert (engine.strategy.cluster_environment.node_rank(), engine.local_rank) == (1, 0)


def test_an_environment_that_is_given_knows_its_processes_itself(set_variables):
    set_variables({"RANK": 1, "WORLD_SIZE": 20} | MEETING)
    engine = Engine(**QUIET, strategy="ddp", devices=2, plugins=KubeflowEnvironment())
    assert isinstance(engine.strategy.cluster_environment, KubeflowEnvironment)
    assert (engine.global_rank, engine.local_rank) == (1, 0)


def test_ranks_that_lightning_has_started_are_no_launch(set_variables):
    set_variables({"WORLD_SIZE": 2, "LOCAL_RANK": 1, "NODE_RANK": 0} | MEETING)
    assert _launched_sizes() is None


def test_mpi_within_a_slurm_job_comes_first(set_variables):
    set_variables({"SLURM_NTASKS": 2, "SLURM_NNODES": 2, "SLURM_JOB_NAME": "train"})
    set_variables(dict(zip(NAMES["Open MPI"], (8, 5, 1, 4), strict=True)) | MEETING)
    assert launcher_name() == "Open MPI"
    assert _launched_sizes() == (8, 4)


def test_the_users_cluster_environment_is_kept(set_variables):
    set_variables(dict(zip(NAMES["Open MPI"], (2, 0, 0, 2), strict=True)) | MEETING)
    mine = LaunchedEnvironment("Open MPI", 1)
    assert Engine(**QUIET, strategy="ddp", plugins=[mine]).strategy.cluster_environment is mine


class TestWhereTheyMeet:
    def test_processes_of_one_machine_meet_by_the_name_of_their_job(self, set_variables):
        ports = []
        for job in ("prterun-1@1", "prterun-1@1", "prterun-2@1"):
            set_variables(dict(zip(NAMES["Open MPI"], (2, 1, 1, 2), strict=True)) | {"PMIX_NAMESPACE": job})
            environment = LaunchedEnvironment("Open MPI", 1)
            assert environment.main_address == "127.0.0.1"
            ports.append(environment.main_port)
        assert ports[0] == ports[1] != ports[2]

    @pytest.mark.parametrize("variables", [{"MASTER_PORT": 29500}, {}])
    def test_nodes_that_can_not_meet_are_refused(self, set_variables, variables):
        set_variables({"RANK": 1, "WORLD_SIZE": 3} | variables)
        with pytest.raises(ValueError, match="started 3 processes, but nothing says where they meet: set MASTER_ADDR"):
            Engine(**QUIET, strategy="ddp")

    def test_one_machine_without_a_port_is_refused(self, set_variables):
        set_variables(dict(zip(NAMES["MVAPICH"], (2, 1, 1, 2), strict=True)))
        with pytest.raises(ValueError, match="set MASTER_ADDR to the machine of rank 0 and MASTER_PORT"):
            Engine(**QUIET, strategy="ddp")


_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
_SLURM = {"SLURM_NTASKS": 2, "SLURM_NNODES": 1, "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": 2} | dict.fromkeys(
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), 0
)
_MPI = dict(zip(NAMES["Open MPI"], (2, 1, 1, 2), strict=True))


class TestValues:
    """Of what a launcher or a person has set: told by name, before anything starts."""

    @pytest.mark.parametrize(
        ("variables", "said"),
        [
            ({"RANK": "abc", "WORLD_SIZE": 2}, "RANK='abc' must be a whole number from 0"),
            ({"RANK": "abc"}, "RANK='abc' must be a whole number"),
            ({"RANK": 5, "WORLD_SIZE": 2}, r"RANK=5 and WORLD_SIZE=2 contradict .*2 process\(es\) RANK is from 0 to 1"),
            ({"RANK": 1, "WORLD_SIZE": 1}, "RANK=1 and WORLD_SIZE=1 contradict each other"),
            (
                {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2},
                "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2",
            ),
            ({"RANK": -1, "WORLD_SIZE": 2}, "RANK='-1' must"),
            ({"RANK": 0, "WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number from 1"),
            ({"RANK": 0, "WORLD_SIZE": 10**12}, "WORLD_SIZE='1000000000000' must"),
            ({"RANK": 0, "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' must"),
            ({"RANK": "\u0661", "WORLD_SIZE": 2}, "RANK='\u0661' must"),
            ({"SLURM_NTASKS": "x", "SLURM_JOB_NAME": "train"}, "SLURM_NTASKS='x' must"),
            ({"SLURM_NTASKS": 2, "SLURM_JOB_NAME": "train", "SLURM_PROCID": 2}, "SLURM_PROCID=2 and SLURM_NTASKS=2"),
            ({"SLURM_NTASKS": 2, "SLURM_JOB_NAME": "train", "SLURM_NNODES": "two"}, "SLURM_NNODES='two' must"),
            ({"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_RANK": "r"}, "OMPI_COMM_WORLD_RANK='r' must"),
            ({"MASTER_PORT": 99999999}, "MASTER_PORT='99999999' must be a whole number from 1 to 65535"),
            ({"MASTER_PORT": "http"}, "MASTER_PORT='http' must"),
            ({"MASTER_ADDR": ""}, "MASTER_ADDR='' must be the name or the address"),
            ({"MASTER_ADDR": "host:29500"}, "MASTER_ADDR='host:29500' must .* its port belongs into MASTER_PORT"),
            ({"MASTER_ADDR": "tcp://host"}, "MASTER_ADDR='tcp://host' must"),
            ({"MASTER_ADDR": "*"}, r"MASTER_ADDR='\*' must"),
            ({"MASTER_ADDR": "-"}, "MASTER_ADDR='-' must"),
            ({"MASTER_ADDR": "n\u00f6de..x"}, "MASTER_ADDR='n\u00f6de..x' must"),
            ({"MASTER_ADDR": "a" * 300}, "MASTER_ADDR='aaa"),
            ({"NODE_RANK": "first"}, "NODE_RANK='first' must"),
            ({"SLURM_RESTART_COUNT": "once"}, "SLURM_RESTART_COUNT='once' must"),
            ({"PL_GLOBAL_SEED": "lucky"}, "PL_GLOBAL_SEED='lucky' must"),
            ({"PL_SEED_WORKERS": "yes"}, "PL_SEED_WORKERS='yes' must be a whole number from 0 to 1"),
            ({"RANK": ""}, "RANK='' must"),
            ({"LOCAL_RANK": ""}, "LOCAL_RANK='' must"),
            ({"GROUP_RANK": ""}, "GROUP_RANK='' must"),
            ({"MASTER_PORT": ""}, "MASTER_PORT='' must"),
            ({"STANDALONE_PORT": ""}, "STANDALONE_PORT='' must"),
            ({"RANK": 0, "WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "one"}, "LOCAL_RANK='one' must"),
            ({"SLURM_NTASKS": 2, "SLURM_JOB_NAME": "train", "SLURM_PROCID": " "}, "SLURM_PROCID=' ' must"),
            ({"SLURM_NTASKS": 2, "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "abc"}, "SLURM_JOB_ID='abc' must"),
            ({"LSB_JOBID": "x"}, "LSB_JOBID='x' must"),
            ({"LOCAL_RANK": 5}, r"LOCAL_RANK=5 doesn't fit 1 node\(s\) of 2 process\(es\) each: it is from 0 to 1"),
            ({"NODE_RANK": 1}, "NODE_RANK=1 doesn't fit 1 node"),
            ({"GROUP_RANK": 3}, "GROUP_RANK=3 doesn't fit 1 node"),
            (_TORCHRUN | {"LOCAL_RANK": 2}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict"),
            (_TORCHRUN | {"GROUP_RANK": 1}, "GROUP_RANK=1 doesn't fit 1 node"),
            (_SLURM | {"SLURM_LOCALID": 2}, "SLURM_LOCALID=2 doesn't fit 1 node"),
            (_SLURM | {"SLURM_NODEID": 7}, "SLURM_NODEID=7 doesn't fit 1 node"),
        ],
    )
    def test_one_that_can_not_be(self, set_variables, variables, said):
        set_variables(variables)
        with pytest.raises(ValueError, match=rf"^the environment variables? {said}"):
            Engine(**QUIET, strategy="ddp", devices=2)

    @pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"])
    def test_one_that_is_read_while_lightning_is_imported(self, name):
        script = "from polyphase.engine import Engine\nimport lightning\n"
        finished = run_command(["/usr/bin/env", f"{name}=1.0", sys.executable, "-c", script], cold=True)
        said = f"ValueError: the environment variable {name}='1.0' must be a whole number"
        assert finished.output.splitlines()[-1].startswith(said), finished.output

    @pytest.mark.parametrize("lines", [None, "", "batch\n", "batch\nelsewhere\n", b"\xff", "folder", "pipe"])
    def test_a_file_of_hosts_that_is_none(self, set_variables, tmp_path, lines):
        path = tmp_path / "hosts"
        if lines == "folder":
            path.mkdir()
        elif lines == "pipe":
            os.mkfifo(path)
        elif lines is not None:
            path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
        set_variables(dict(zip(NAMES["LSF"], (2, 0, 0, 2), strict=True)))
        set_variables({"LSB_JOBID": 17, "LSB_DJOB_RANKFILE": str(path)})
        said = re.escape(f"the environment variable LSB_DJOB_RANKFILE={str(path)!r} must name a file with a host on")
        with pytest.raises(ValueError, match=said):
            Engine(**QUIET, strategy="ddp")

    @pytest.mark.parametrize(
        ("variables", "missing", "said"),
        [
            (_TORCHRUN, "RANK", "TORCHELASTIC_RUN_ID=x says that torchrun has started this process, .* without RANK: "),
            (_TORCHRUN, "LOCAL_RANK", "but not as which, without LOCAL_RANK: start it by torchrun, or unset TORCHELA"),
            (_TORCHRUN, "WORLD_SIZE", "without WORLD_SIZE"),
            (
                _SLURM,
                "SLURM_PROCID",
                "SLURM_NTASKS=2 says that SLURM has .* without SLURM_PROCID: start it by srun",
            ),
            (_SLURM, "SLURM_LOCALID", "without SLURM_LOCALID"),
            (_SLURM, "SLURM_NODEID", "without SLURM_NODEID"),
            (_MPI, "OMPI_COMM_WORLD_SIZE", r"process 1 of several \(OMPI_COMM_WORLD_RANK\), but OMPI_COMM_WORLD_SIZE"),
            (_MPI, "OMPI_COMM_WORLD_RANK", r"one of 2 processes \(OMPI_COMM_WORLD_SIZE\), but OMPI_COMM_WORLD_RANK"),
        ],
    )
    def test_one_that_is_missing(self, set_variables, variables, missing, said):
        set_variables({name: value for name, value in variables.items() if name != missing})
        with pytest.raises(ValueError, match=said):
            Engine(**QUIET, strategy="ddp", devices=2)

    @pytest.mark.parametrize("address", ["10.0.0.7", "node-1.cluster_a", "::1", "[fe80::1%eth0]", "::ffff:10.0.0.7"])
    def test_addresses(self, set_variables, address):
        set_variables({"MASTER_ADDR": address, "MASTER_PORT": " 29500 "})
        Engine(**QUIET, strategy="ddp", devices=2)


class TestContradictions:
    def test_the_flags(self, set_variables):
        set_variables(dict(zip(NAMES["Open MPI"], (4, 0, 0, 4), strict=True)) | MEETING)
        with pytest.raises(ValueError, match=r"Open MPI started 1 node\(s\) x 4 process\(es\).*devices=4\."):
            Engine(**QUIET, strategy="ddp", devices=2)

    def test_processes_of_which_nobody_says_where_they_are(self, set_variables):
        set_variables({"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4} | MEETING)
        with pytest.raises(ValueError, match="nothing says how many of them are on this machine: set LOCAL_WORLD_SIZE"):
            Engine(**QUIET, strategy="ddp")
        engine = Engine(**QUIET, strategy="ddp", num_nodes=2)
        assert (engine.num_devices, engine.num_nodes) == (2, 2)

    def test_ranks_that_are_not_numbered_node_by_node(self, set_variables):
        set_variables(dict(zip(NAMES["Open MPI"], (4, 1, 0, 2), strict=True)) | MEETING)
        with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_LOCAL_RANK=0 don't fit"):
            Engine(**QUIET, strategy="ddp")

    def test_a_node_of_several_without_torchrun(self, set_variables):
        set_variables({"PET_NNODES": "2", "PET_NODE_RANK": "0"})
        with pytest.raises(ValueError, match=r"one of 2 nodes \(PET_NNODES\).*run torchrun, or `polyphase launch --`"):
            Engine(**QUIET)

    def test_a_rank_of_nobody_knows_how_many(self, set_variables):
        set_variables({"RANK": 1})
        with pytest.raises(ValueError, match=r"process 1 of several \(RANK\), but WORLD_SIZE does not say"):
            Engine(**QUIET)


def test_a_rank_that_lightning_starts_has_all_four_variables_of_torchrun_while_it_runs(set_variables):
    set_variables({"WORLD_SIZE": 4, "LOCAL_RANK": 1})
    before = dict(os.environ)
    with rank_variables(3, 4, 2):
        assert [int(os.environ[name]) for name in NAMES["RANK and WORLD_SIZE"]] == [4, 3, 1, 2]
        assert launcher_name() is None  # also for an engine of its own, and in processes that it starts
        assert resolve_sizes(1, 1) == (1, 1)
    assert dict(os.environ) == before


def test_such_a_rank_may_go_on_in_one_process(set_variables):
    set_variables({"WORLD_SIZE": 2, "LOCAL_RANK": 1})
    with rank_variables(1, 2, 2):
        del os.environ["WORLD_SIZE"]  # as Lightning does at the end of a run
    Engine(**QUIET)


def test_launchers_within_such_a_rank_are_seen(set_variables):
    set_variables({"WORLD_SIZE": 2, "LOCAL_RANK": 1})
    with rank_variables(1, 2, 2):
        set_variables({"WORLD_SIZE": 3, "RANK": 2, "LOCAL_WORLD_SIZE": 3})
        assert launcher_name() == "RANK and WORLD_SIZE"


@pytest.mark.parametrize(
    "variables",
    [{}, {"WORLD_SIZE": 3, "LOCAL_RANK": 1}, {"WORLD_SIZE": 2, "LOCAL_RANK": 1, "RANK": 1}],
    ids=["a forked rank", "another run's", "a launcher's"],
)
def test_variables_that_are_not_lightnings_stay_as_they_are(set_variables, variables):
    set_variables(variables)
    before = dict(os.environ)
    with rank_variables(1, 2, 2):
        assert dict(os.environ) == before
    assert dict(os.environ) == before
