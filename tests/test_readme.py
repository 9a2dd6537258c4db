"""README.md agrees with the programs: options, commands, Python examples, results, files."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import cython_kernels
from bench import accuracy, epoch, kernels, overlap, pipelining, scaling, staleness, undelayed
from dorylus_hpc import deploy, model, predict, prepare
from dorylus_hpc.config import UNAVAILABLE_OPTIONS, TrainConfig, parse_train
from dorylus_hpc.report.cost import load_prices
from dorylus_hpc.serverless import archive
from dorylus_hpc.serverless.controller import LambdaAccount
from dorylus_hpc.serverless.local import settings as local
from dorylus_hpc.serverless.local.faults import Faults
from dorylus_hpc.serverless.policies import LOGS_POLICY, Names, caller_policy, role_policies

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PARSERS = {
    "prepare": lambda arguments: prepare.build_parser().parse_args(arguments),
    "train": lambda arguments: parse_train(arguments, "train"),
    "predict": predict._parse,
    "deploy": deploy.parse,
    "model": model.parse,
    "serverless.archive": archive.build_parser().parse_args,
    "serverless.local": local.parse,
    "bench.accuracy": accuracy.parser().parse_args,
    "bench.epoch": epoch.parser().parse_args,
    "bench.kernels": kernels.parse,
    "bench.overlap": overlap.parse,
    "bench.pipelining": pipelining.parse,
    "bench.scaling": scaling.parser().parse_args,
    "bench.staleness": staleness.parser().parse_args,
    "bench.undelayed": undelayed.parse,
}
SHORTEST = {
    "prepare": ["graph.npz", "-o", "folder", "--parts", "1"],
    "train": ["--data", "digits"],
    "predict": ["--run-dir", "run", "--data", "digits", "-o", "file.npz"],
    "deploy": ["up"],
}
TOOLS = {"ruff", "mypy", "python"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def table(first_cell):
    """Give the rows, as lists of cells, of the table whose head starts with a cell; group titles left out."""
    lines = iter(TEXT.splitlines())
    next(line for line in lines if line.startswith(f"| {first_cell} |"))
    next(lines)  # the line of dashes
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if not cells[0].startswith("**"):
            rows.append(cells)
    return rows


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def help_of(program):
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        PARSERS[program](["--help"])
    assert ended.value.code == 0
    return printed.getvalue()


def commands():
    return [
        shlex.split(line) for block in blocks("sh") for line in block.splitlines() if not line.startswith("#")
    ]


# ---- options ----


@pytest.mark.parametrize("program", SHORTEST)
def test_options_are_those_of_help(program):
    shown = re.findall(r"^  (?:-\w(?: [\w.]+)?, )?(--[\w-]+)", help_of(program), re.MULTILINE)
    told = [flag for row in table(f"option of `{program}`") for flag in code(row[0]) if flag.startswith("--")]
    assert sorted(told) == sorted(set(shown) - {"--help"})


@pytest.mark.parametrize("program", SHORTEST)
def test_defaults(program):
    defaults = vars(PARSERS[program](SHORTEST[program]))
    for flags, default, _ in table(f"option of `{program}`"):
        name = code(flags)[-1].removeprefix("--").replace("-", "_")
        if name not in [word.strip("-").replace("-", "_") for word in SHORTEST[program]] and default:
            assert str(defaults[name]) == default, name


def test_what_train_refuses_by_name():
    start = TEXT.index("Refused by name")
    told = set(re.findall(r"`--([a-z-]+(?: [a-z-]+)?)`", TEXT[start : TEXT.index("\n\n", start)]))
    assert told == {name.replace("_", "-") for name in UNAVAILABLE_OPTIONS}


# ---- commands ----


def without_settings(words):
    """Leave out what stands before the command: variables."""
    return words[next(at for at, word in enumerate(words) if "=" not in word) :]


def started(words):
    """Split a command into ranks, program and arguments; the program is None where it is not ours."""
    words = without_settings(words)
    ranks = 1
    launcher, *rest = words
    if rest[:1] == ["-n"] and Path(launcher).name.startswith("mpirun"):
        ranks, rest = int(rest[1]), rest[2:]
    if launcher == "./mpirun.sh":
        program, *arguments = rest or ["demo"]
        return ranks, program if program in PARSERS else None, arguments
    if launcher == "mpirun":
        launcher, *rest = rest
    if launcher in ("python", ".venv/bin/python") and rest[0] == "-m":
        return ranks, rest[1].removeprefix("dorylus_hpc."), rest[2:]
    tool = Path(launcher)
    assert (
        launcher == "source"
        or (tool.parent == Path(".venv/bin") and tool.name in TOOLS)
        or (launcher == "bash" and (ROOT / rest[0]).is_file())
    ), words
    return ranks, None, rest


def test_commands_are_right_one_after_the_other(tmp_path, monkeypatch):
    """Every command is accepted, and finds what an earlier one, or an example, has made."""
    monkeypatch.chdir(tmp_path)
    graphs = {"digits": None, "DIR/debian12_packages.npz": None}  # with the parts of prepared ones
    graphs |= dict.fromkeys(re.findall(r'np\.savez\(\s*"([^"]+)"', "".join(blocks("python"))))
    runs = set()
    seen = set()
    for words in commands():
        ranks, program, arguments = started(words)
        if program is None or "--help" in arguments:
            continue
        if "--config" in arguments:
            path = Path(arguments[arguments.index("--config") + 1])
            assert str(path.parent) in runs, words
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(TrainConfig().to_toml().replace('data = ""', 'data = "graph.npz"'))
        options = PARSERS[program](arguments)
        seen.add(program)
        if program == "prepare":
            assert options.input in graphs, words
            graphs[options.output] = options.parts
        if program in ("train", "predict"):
            assert options.data in graphs, words
            parts = graphs[options.data]
            assert parts is None or ranks - getattr(options, "servers", 0) <= parts, words
        if program == "train":
            runs.add(options.run_dir)
        if program == "predict":
            assert str(options.run_dir) in runs, words
    assert seen == set(PARSERS)


def test_commands_of_the_script_are_accepted():
    scripted = [without_settings(words) for words in commands() if "./mpirun.sh" in words]
    for _, *arguments in scripted:
        if {"setup", "test"} & set(arguments):
            assert arguments[0] in ("setup", "test")
            continue
        command = [ROOT / "mpirun.sh", "--no-setup", "--dry-run", *arguments]
        environment = {**os.environ, "DORYLUS_PYTHON": sys.executable}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, (arguments, result.stderr)


def test_opens_with_the_two_commands():
    assert re.findall(r"^    (\S.*)$", TEXT, re.MULTILINE)[:2] == ["./mpirun.sh", "./mpirun.sh test"]


# ---- examples, and what they leave ----


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Run all Python examples, one after the other in one process of its own, in an empty folder."""
    folder = tmp_path_factory.mktemp("examples")
    script = folder / "examples.py"
    script.write_text("\n\n".join(blocks("python")), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    run_dir = folder / "runs" / "example"
    return SimpleNamespace(result=result, folder=folder, run_dir=run_dir)


def test_python_examples_run(examples):
    assert examples.result.returncode == 0, examples.result.stderr
    assert (examples.folder / "graph.npz").is_file()
    assert "(600, 3)" in examples.result.stdout


def test_keys_of_the_summary(examples):
    summary = json.loads((examples.run_dir / "summary.json").read_text())
    told = {key: code(row[1]) for row in table("key of `summary.json`") for key in code(row[0])}
    assert set(told) == set(summary)
    for key, inside in told.items():
        if inside or (isinstance(summary[key], dict) and key != "config"):
            assert set(inside) == set(summary[key]), key


def test_files_of_a_run(examples):
    rows = {code(row[0])[0]: row[1] for row in table("file in the run's folder")}
    left = {path.name + "/" * path.is_dir() for path in examples.run_dir.iterdir()}
    assert set(rows) == left
    line = json.loads((examples.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert set(code(rows["metrics.jsonl"])) == set(line)


# ---- Lambda ----


def test_keys_of_lambda_are_those_of_an_account():
    rows = table("more keys of `lambda` in a run on Lambda")
    told = [key for keys, _ in rows for key in code(keys)]
    assert sorted(told) == sorted(field.name for field in fields(LambdaAccount))


def test_faults_are_those_of_the_local_service():
    start = TEXT.index("`--local-faults` makes")
    told = code(TEXT[start : TEXT.index("```", start)])
    assert sorted(told[1:]) == sorted(field.name for field in fields(Faults))
    with_faults = [words for words in commands() if "--local-faults" in words]
    assert with_faults
    for words in with_faults:
        Faults.parse(words[words.index("--local-faults") + 1])


def test_prices_of_the_example_are_taken(tmp_path):
    (example,) = blocks("toml")
    (tmp_path / "prices.toml").write_text(example)
    ours, packaged = load_prices(tmp_path / "prices.toml"), load_prices()
    assert ours.dated == "2027-01"
    assert ours.ec2_hour == {**packaged.ec2_hour, "c5n.2xlarge": 0.15} != packaged.ec2_hour
    assert ours.gb_second == packaged.gb_second


def test_policies_are_those_that_deploy_makes():
    names = Names("dorylus-hpc", "us-east-1", "ACCOUNT")
    told = [json.loads(block) for block in blocks("json")]
    assert told == [caller_policy(names), role_policies(names, network=False)[LOGS_POLICY]]
    assert TrainConfig().function == names.function == PARSERS["deploy"](["up"]).function
    assert local.LocalSettings().function == names.function


# ---- kernels ----


def test_all_kernels_are_in_the_table():
    told = [name for row in table("kernel") for name in code(row[0])]
    assert sorted(told) == sorted(cython_kernels.__all__)


def test_contents_name_every_chapter_that_has_a_link():
    contents = TEXT[TEXT.index("Contents:") : TEXT.index("## In five commands")]
    chapters = re.findall(r"^## (.*)$", re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S), re.MULTILINE)
    assert re.findall(r"\[([^]]+)\]", contents) == chapters[1:]


# ---- places ----


def test_files_of_the_map_exist():
    files = [path for row in table("idea") for path in code(row[1])]
    assert len(files) > 40
    assert [path for path in files if not (ROOT / path).is_file()] == []


def test_links_lead_to_headings():
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors
