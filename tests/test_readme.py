"""The README says what the code does."""

from __future__ import annotations

import re

import pytest
from jobs import launch
from run_mpi import ROOT

from dorylus_hpc.config import train_parser
from dorylus_hpc.prepare import build_parser
from dorylus_hpc.report.metrics import Accuracies, History
from dorylus_hpc.report.summary import build_summary

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title):
    return re.split(r"^##+ ", TEXT.split(title, 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def flags(parser):
    shown = [action for action in parser._actions if action.help != "==SUPPRESS=="]
    return {flag for action in shown for flag in action.option_strings if flag.startswith("--")} - {"--help"}


def test_it_opens_with_the_two_commands():
    commands = [line.split("#")[0].strip() for line in TEXT.splitlines() if line.startswith("    ")]
    assert commands[:2] == ["./mpirun.sh", "./mpirun.sh test"]


@pytest.mark.parametrize(
    ("title", "parser"),
    [("## Training", train_parser("train")), ("### What `prepare` checks", build_parser())],
)
def test_tables_of_options_are_complete(title, parser):
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `--")]
    named = set(re.findall(r"--[a-z-]+", " ".join(rows)))
    assert named == flags(parser) - {"--output"}


def test_keys_of_the_summary_are_listed():
    evaluation = Accuracies(0)
    summary = build_summary(
        graph={},
        config={},
        ranks={},
        history=History([1.0], [1.0], [evaluation]),
        best=evaluation,
        setup_seconds=0.0,
        task_seconds={},
        peak_rss_bytes=[],
        ghost_bytes_per_epoch=0,
        weights_sha256="",
    )
    text = section("**What a run leaves**")
    assert [key for key in summary if f"`{key}`" not in text] == []


def test_every_file_of_the_map_exists():
    files = re.findall(r"`([\w/]+\.\w+)`", section("## Where each idea lives"))
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_examples_run(tmp_path):
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        ended = launch(0, ["-c", block], cwd=tmp_path)
        assert ended.status == 0, ended.err
    assert (tmp_path / "runs" / "example" / "summary.json").is_file()
