"""mpirun.sh: arguments, the command it builds for each kind of launcher, and what it says when it cannot.

Nothing is installed here: `--dry-run` and `--no-setup` set nothing up, and the launchers are small scripts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "mpirun.sh"

VERSIONS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11",
    "openmpi4": "mpirun (Open MPI) 4.1.8",
    "mpich": "HYDRA build details:\n    Version: 5.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.16",
    "slurm": "slurm 24.05.1",
}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs mpirun.sh in an empty folder, in an environment without MPI variables."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    caller = tmp_path / "caller"
    caller.mkdir()

    def call(*arguments, **environment):
        variables = {**kept, "DORYLUS_VENV": str(tmp_path / "venv"), **environment}
        return subprocess.run(
            [SCRIPT, *arguments],
            cwd=caller,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return call


@pytest.fixture
def launcher(tmp_path):
    """Return a function that makes a launcher of a kind, which knows its version and no more."""

    def make(kind, body=""):
        path = tmp_path / "launchers" / kind / "mpirun"
        path.parent.mkdir(parents=True)
        path.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo {shlex.quote(VERSIONS[kind])}; exit; fi\n{body}\n'
        )
        path.chmod(0o755)
        return str(path)

    return make


def planned(result):
    """Split what --dry-run printed into the settings and the command."""
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    first = next(at for at, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:first]), words[first:]


def test_syntax():
    for script in (SCRIPT, ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    subprocess.run(["shellcheck", SCRIPT, ROOT / ".ci" / "run"], check=True)


def test_help_names_every_command_and_variable(run):
    result = run("--help")
    assert result.returncode == 0
    for word in ("demo", "test", "train", "prepare", "predict", "setup", "python", "--dry-run", "--no-setup"):
        assert word in result.stdout
    for name in ("VENV", "PYTHON", "MPIRUN", "MPIRUN_FLAGS"):
        assert f"DORYLUS_{name} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch"], "unknown command launch"),
        (["errors"], "unknown command errors"),  # a module, not an entry point
        (["../setup"], "unknown command ../setup"),
        (["--ranks", "2"], "unknown option --ranks"),
        (["-n"], "needs a number of ranks"),
        (["-n", "0", "train"], "got '0'"),
        (["-n", "two", "train"], "got 'two'"),
        (["-n", "-1", "train"], "got '-1'"),
        (["setup", "now"], "setup takes no arguments, got now"),
        (["demo", "--epochs", "3"], "demo takes no arguments, got --epochs"),
        (["--dry-run", "test"], "not test"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(run, tmp_path, arguments, said):
    result = run(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_demo_is_three_ranks_with_one_server(run, launcher, tmp_path):
    _, command = planned(run("--dry-run", DORYLUS_MPIRUN=launcher("openmpi5")))
    python = str(tmp_path / "venv" / "bin" / "python")
    assert command[1:3] == ["-n", "3"]
    assert command[command.index(python) :] == [
        *(python, "-P", "-m", "dorylus_hpc.train"),
        *("--data", "digits", "--servers", "1", "--run-dir", "runs/digits"),
    ]
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("program", ["train", "predict"])
def test_programs_get_ranks_and_their_arguments_untouched(run, launcher, program):
    arguments = ["--data", "my file.npz", "-n", "$HOME", "*", ""]
    _, command = planned(run("--dry-run", "-n", "8", program, *arguments, DORYLUS_MPIRUN=launcher("mpich")))
    assert command[1:3] == ["-n", "8"]
    assert command[-len(arguments) - 3 :] == ["-P", "-m", f"dorylus_hpc.{program}", *arguments]


def test_one_rank_unless_told(run, launcher):
    _, command = planned(run("--dry-run", "train", DORYLUS_MPIRUN=launcher("mpich")))
    assert command[1:3] == ["-n", "1"]


def test_prepare_runs_without_ranks(run, launcher, tmp_path):
    result = run("--dry-run", "-n", "4", "prepare", "a.npz", DORYLUS_MPIRUN=launcher("openmpi5"))
    python = str(tmp_path / "venv" / "bin" / "python")
    assert planned(result) == ({}, [python, "-P", "-m", "dorylus_hpc.prepare", "a.npz"])
    assert "-n 4 is not used" in result.stderr


def test_open_mpi_5(run, launcher):
    settings, command = planned(run("--dry-run", "-n", "2", "train", DORYLUS_MPIRUN=launcher("openmpi5")))
    assert settings["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert settings["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert settings["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_rmaps_base_oversubscribe" not in settings
    assert "OMPI_MCA_pml" not in settings  # on a cluster the network is its own Open MPI's choice
    assert ["-x", "OMP_NUM_THREADS"] == command[3:5]


def test_open_mpi_4_has_the_older_names(run, launcher):
    settings, _ = planned(run("--dry-run", "-n", "2", "train", DORYLUS_MPIRUN=launcher("openmpi4")))
    assert settings["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert settings["OMPI_MCA_hwloc_base_binding_policy"] == "none"
    assert not any(name.startswith("PRTE") for name in settings)


def test_open_mpi_of_the_environment_needs_no_network(run, launcher, tmp_path):
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    shutil.copy(launcher("openmpi5"), bin_folder / "mpirun")
    settings, command = planned(run("--dry-run", "-n", "2", "train"))
    assert command[0] == str(bin_folder / "mpirun")
    assert (settings["OMPI_MCA_pml"], settings["OMPI_MCA_osc"]) == ("ob1", "^ucx")


@pytest.mark.parametrize("kind", ["openmpi4", "openmpi5"])
def test_root_is_allowed_only_where_it_is_root(run, launcher, kind):
    settings, _ = planned(run("--dry-run", "train", DORYLUS_MPIRUN=launcher(kind)))
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in settings) == (os.geteuid() == 0)


@pytest.mark.parametrize("kind", ["mpich", "intel"])
def test_mpich(run, launcher, kind):
    settings, command = planned(run("--dry-run", "-n", "2", "train", DORYLUS_MPIRUN=launcher(kind)))
    assert command[1:5] == ["-n", "2", "-bind-to", "none"]
    assert not any(name.startswith(("OMPI_", "PRTE_")) for name in settings)


def test_slurm(run, launcher):
    _, command = planned(run("--dry-run", "-n", "2", "train", DORYLUS_MPIRUN=launcher("slurm")))
    assert command[1:6] == ["-n", "2", "--mpi=pmix", "--overcommit", "--cpu-bind=none"]


def test_threads_fill_the_cores_once(run, launcher):
    mpich = launcher("mpich")
    cores = int(subprocess.run(["nproc"], env={"PATH": os.environ["PATH"]}, capture_output=True).stdout)
    alone, _ = planned(run("--dry-run", "-n", "1", "train", DORYLUS_MPIRUN=mpich))
    assert (alone["OMP_NUM_THREADS"], alone["OPENBLAS_NUM_THREADS"]) == (str(cores), "1")
    assert "OMP_WAIT_POLICY" not in alone
    crowded, _ = planned(run("--dry-run", "-n", str(cores + 1), "train", DORYLUS_MPIRUN=mpich))
    assert (crowded["OMP_NUM_THREADS"], crowded["OMP_WAIT_POLICY"]) == ("1", "passive")


def test_what_the_user_set_wins(run, launcher):
    settings, command = planned(
        run(
            *("--dry-run", "-n", "2", "train"),
            DORYLUS_MPIRUN=launcher("openmpi5"),
            DORYLUS_MPIRUN_FLAGS="--hostfile hosts  --map-by node",
            OMP_NUM_THREADS="5",
            PRTE_MCA_hwloc_default_binding_policy="core",
        )
    )
    assert settings["OMP_NUM_THREADS"] == "5"
    assert settings["PRTE_MCA_hwloc_default_binding_policy"] == "core"
    assert command[9:13] == ["--hostfile", "hosts", "--map-by", "node"]


def test_runs_in_the_callers_folder_with_its_status(run, launcher, tmp_path):
    mpirun = launcher(
        "openmpi5", body='pwd; echo "$OPENBLAS_NUM_THREADS $OMPI_MCA_mpi_yield_when_idle"; exit 7'
    )
    result = run("--no-setup", "-n", "2", "train", DORYLUS_MPIRUN=mpirun, DORYLUS_PYTHON=sys.executable)
    assert result.returncode == 7
    assert result.stdout.splitlines() == [str(tmp_path / "caller"), "1 1"]


def test_a_link_to_the_script_finds_the_clone(tmp_path):
    link = tmp_path / "dorylus"
    link.symlink_to(SCRIPT)
    result = subprocess.run([link, "--dry-run", "train"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "dorylus_hpc.train" in result.stdout


def test_folder_with_other_things_is_left_alone(run, tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("years of work")
    result = run("setup")
    assert result.returncode == 1
    assert "no virtual environment; set DORYLUS_VENV" in result.stderr
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["thesis.txt"]


def test_python_too_old_is_said(run, tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run("setup", DORYLUS_PYTHON=str(old))
    assert result.returncode == 1
    assert f"DORYLUS_PYTHON={old} is not a Python 3.11 or newer" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_python_without_venv_is_said(run, tmp_path):
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\ncase $2 in *ensurepip*) exit 1 ;; esac\n")
    bare.chmod(0o755)
    result = run("setup", DORYLUS_PYTHON=str(bare))
    assert result.returncode == 1
    assert "has no venv module" in result.stderr


def test_what_lambda_needs_is_installed_when_it_is_asked_for(run, launcher, tmp_path):
    log = tmp_path / "log"
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    python.write_text(
        f"""#!/bin/sh
case "$*" in
    "-m pip install "*) for last; do :; done; echo "${{last##*[}}" >>{log} ;;
    "- "*) cat >/dev/null; echo fingerprint ;;
esac
"""
    )
    python.chmod(0o755)
    mpirun = launcher("mpich", "echo size 2")

    def installed(*arguments):
        log.write_text("")
        assert run(*arguments, DORYLUS_MPIRUN=mpirun).returncode == 0
        return log.read_text().split()

    assert installed("train", "--data", "lambda.npz") == ["demo]"]
    assert installed("train", "--data", "digits", "--backend", "cpu") == []
    assert installed("-n", "2", "train", "--backend", "lambda-local") == ["demo,lambda-local]"]
    for words in (["train", "--backend=lambda"], ["deploy", "status"], ["train", "--data", "digits"]):
        assert installed(*words) == []
    (tmp_path / "venv" / ".dorylus" / "lambda-local").unlink()
    assert installed("deploy", "status") == ["demo,lambda-local]"]
