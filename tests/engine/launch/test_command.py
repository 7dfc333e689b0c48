"""`polyphase launch`: what it hands to torchrun, and what it refuses."""

import pytest
from torch.distributed.run import get_args_parser

from polyphase.engine.cli import main as polyphase
from polyphase.engine.launch.command import main, torchrun_arguments


@pytest.fixture
def script(tmp_path):  # each test runs in tmp_path
    (tmp_path / "train.py").touch()
    (tmp_path / "my_module.py").touch()


def arguments(text: str) -> list[str]:
    return torchrun_arguments(text.split())[0]


@pytest.mark.usefixtures("script")
def test_one_machine_meets_on_a_port_of_its_own():
    passed, num_processes = torchrun_arguments(["--nproc", "2", "--", "train.py", "--epochs", "5"])
    assert passed[:4] == ["--nproc-per-node=2", "--nnodes=1", "--max-restarts=3", "--monitor-interval=1"]
    assert passed[4:] == ["--standalone", "--local-addr=127.0.0.1", "train.py", "--epochs", "5"]
    assert num_processes == 2


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    "options", ["--nnodes 1:2 --rdzv-endpoint head:1", "--rdzv-backend c10d", "--master_port 5000", "--standalone"]
)
def test_a_meeting_place_of_the_user_s_stays(options):
    passed = arguments(f"{options} -- train.py")
    assert passed.count("--standalone") == options.count("--standalone")
    assert passed[-1] == "train.py"


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("options", "conf"),
    [
        ("--nnodes 1:2", "last_call_timeout=10"),
        ("--nnodes 1:2 --last-call 45", "last_call_timeout=45"),
        ("--nnodes 1:2 --rdzv_conf is_host=1,read_timeout=9", "is_host=1,read_timeout=9,last_call_timeout=10"),
        ("--nnodes 1:2 --rdzv-conf=last_call_timeout=3", "last_call_timeout=3"),
        ("--nnodes 2 --last-call 45", None),  # all must come: there is nothing to wait for
    ],
)
def test_how_long_machines_wait_for_more(options, conf):
    given = [word.partition("=")[2] for word in arguments(f"{options} -- train.py") if word.startswith("--rdzv-conf=")]
    assert given == ([] if conf is None else [conf])
    with pytest.raises(ValueError, match=r"--last-call must be a whole number of seconds above 0, but got '0'"):
        arguments("--last-call 0 -- train.py")


@pytest.mark.usefixtures("script")
def test_torchruns_options_are_passed_on_in_either_spelling():
    passed = arguments("--tee 3 --max_restarts=7 --nproc-per-node 2 --monitor_interval 5 --log-dir x -- train.py")
    assert passed[:4] == ["--nproc-per-node=2", "--nnodes=1", "--max-restarts=7", "--monitor-interval=5"]
    assert passed[-5:] == ["--tee", "3", "--log-dir", "x", "train.py"]


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("command", "passed"),
    [
        ("-m my_module --x", ["-m", "my_module", "--x"]),
        ("-m polyphase.engine fit", ["-m", "polyphase.engine", "fit"]),
        ("polyphase fit --model M -- y", ["-m", "polyphase.engine", "fit", "--model", "M", "--", "y"]),
    ],
)
def test_modules_and_our_own_command_are_started_too(command, passed):
    assert arguments(f"--nproc 2 -- {command}")[-len(passed) :] == passed


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--nproc 2 train.py", "launch needs -- in front of what it starts"),
        ("--nproc 2 --", "nothing to start"),
        ("-- trian.py", "no script 'trian.py'; there are my_module.py, train.py"),
        ("-- missing/train.py", "no script 'missing/train.py'\\.$"),
        ("-- -m", "-m needs the name of a module"),
        ("-- -m my_modul.part", "no module 'my_modul.part'"),
        ("--nproc two -- train.py", "unknown --nproc 'two'.*Allowed: auto, cpu, gpu"),
        ("--nproc 0 -- train.py", "--nproc must be a whole number of at least 1, but got 0"),
        ("--nproc -- train.py", "--nproc.*: expected one argument"),
        ("--max-restarts -1 -- train.py", "--max-restarts must be a whole number of at least 0, but got '-1'"),
        ("--nnodes some -- train.py", "--nnodes must be a number of machines or MIN:MAX, but got 'some'"),
        ("--nnodes 3:2 -- train.py", "--nnodes must be .* but got '3:2'"),
    ],
)
def test_what_can_not_be_started_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        torchrun_arguments(text.split())


@pytest.mark.usefixtures("script")
def test_what_is_left_out_is_taken_from_torchruns_variables(monkeypatch):
    trainjob = {"NNODES": "2", "NPROC_PER_NODE": "4", "NODE_RANK": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29400"}
    for name, value in trainjob.items():
        monkeypatch.setenv(f"PET_{name}", value)
    arguments, num_processes = torchrun_arguments(["--", "train.py"])
    taken, _ = get_args_parser().parse_known_args(arguments)
    assert (taken.nnodes, taken.nproc_per_node, taken.node_rank, taken.standalone) == ("2", "4", 1, False)
    assert (taken.master_addr, num_processes) == ("pod-0", 4)
    arguments, _ = torchrun_arguments(["--nnodes", "3", "--", "train.py"])
    assert get_args_parser().parse_known_args(arguments)[0].nnodes == "3", "what is given comes first"


def test_errors_go_to_standard_error_without_a_traceback(capsys):
    assert main(["--nproc", "2", "--", "missing.py"]) == 2
    assert capsys.readouterr().err == "polyphase: error: there is no script 'missing.py'.\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["--nproc", "2", "-h"]])
def test_help_has_examples(words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["polyphase", "launch", *words])
    with pytest.raises(SystemExit) as exit:
        polyphase()
    assert exit.value.code == 0
    assert "polyphase launch --nproc 2 -- train.py --epochs 5" in capsys.readouterr().out
