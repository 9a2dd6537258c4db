"""One configuration from defaults, a file and the command line; what it refuses; that a run can be repeated
from the one it leaves."""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from dataclasses import FrozenInstanceError, asdict, fields

import numpy as np
import pytest
from jobs import run_table, write_ring

from dorylus_hpc.config import (
    UNAVAILABLE_OPTIONS,
    TrainConfig,
    make_config,
    make_parser,
    parse_train,
    read_config_file,
    train_parser,
)
from dorylus_hpc.errors import InputError

# The command line's contract: every option of it, and those among its values that need a feature.
CONTRACT = """data model layers model-file hidden heads dropout input-dropout lr optimizer weight-decay
    decay-scope
    feature-norm dtype epochs target-accuracy patience seed servers intervals threads mode staleness
    weight-update
    eval-every backend function region memory-mb max-workers place tls budget-usd halo-dtype checkpoint-every
    resume
    on-loss run-dir config""".split()
ADDED = """norm residual jumping metric class-weights
    source-degree layer-order constant-aggregate ghost-products save-memory aggregator l2-normalise epsilon
    output-heads negative-slope attention-dropout switch-margin dense-delay straggler trace-events
    endpoint-url function-timeout workers tensor-host tensor-port task-fusion rematerialisation stream-rows
    instance-type prices local-latency local-bandwidth local-faults""".split()
CONTRACT_VALUES = {
    "model": ("gcn", "sage", "gin", "gat", "gatv2"),
    "optimizer": ("adam", "sgd"),
    "decay_scope": ("first", "all"),
    "feature_norm": ("none", "row", "standard"),
    "dtype": ("float32", "float64"),
    "mode": ("nopipe", "pipe", "async"),
    "weight_update": ("epoch", "interval"),
    "backend": ("cpu", "lambda", "lambda-local"),
}
NAMES = [option.name for option in fields(TrainConfig)]


def parse(*words):
    return parse_train([str(word) for word in words], "train")


def flag(name):
    return "--" + name.replace("_", "-")


@pytest.fixture
def toml(tmp_path):
    """Return a function that writes a file of options and returns its path."""

    def write(text):
        path = tmp_path / "options.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# ---- where options come from


def test_defaults_then_file_then_command_line(toml):
    assert (make_config({}).epochs, make_config({}).hidden, make_config({}).lr) == (200, 64, 0.01)
    path = toml('data = "digits"\nepochs = 7\nhidden = 5\n')
    config = parse("--hidden", 9, "--config", path)
    assert (config.data, config.epochs, config.hidden, config.lr) == ("digits", 7, 9, 0.01)
    # Also a value of the command line that is the default wins over the file.
    assert parse("--config", path, "--epochs", 200, "--data", "x.npz") == make_config(
        {"data": "x.npz", "hidden": 5}
    )


def test_the_last_of_equal_options_counts():
    assert parse("--data", "digits", "--epochs", 3, "--epochs", 4).epochs == 4


def test_every_option_from_every_place(toml):
    """Any value that is not the default arrives, by file and by command line alike."""
    other = {
        "data": "a b/ü.npz",
        "model": "sage",
        "aggregator": "gcn",
        "l2_normalise": "on",
        "layers": 3,
        "hidden": 17,
        "dropout": 0.0,
        "input_dropout": 0.25,
        "lr": 0.1,
        "optimizer": "sgd",
        "weight_decay": 0.0,
        "decay_scope": "all",
        "feature_norm": "row",
        "layer_order": "transform-first",
        "constant_aggregate": "off",
        "ghost_products": "exchange",
        "save_memory": "off",
        "dtype": "float64",
        "epochs": 1,
        "seed": 2**63 - 1,
        "servers": 2,
        "intervals": 4,
        "threads": 1,
        "mode": "async",
        "staleness": 0,
        "weight_update": "interval",
        "target_accuracy": 0.75,
        "patience": 7,
        "metric": "f1-macro",
        "class_weights": "balanced",
        "switch_margin": 0.05,
        "backend": "lambda-local",
        "function": "arn:aws:lambda:eu-west-1:123456789012:function:f",
        "region": "eu-west-1",
        "memory_mb": 3538,
        "function_timeout": 900,
        "workers": 150,
        "max_workers": 200,
        "tls": "off",
        "tensor_host": "10.0.0.5",
        "tensor_port": 47100,
        "task_fusion": "off",
        "rematerialisation": "off",
        "stream_rows": 256,
        "budget_usd": 0.25,
        "instance_type": "c5n.2xlarge",
        "prices": "my prices.toml",
        "local_latency": 0.05,
        "local_bandwidth": 75e6,
        "local_faults": "drop=0.1,seed=3",
        "trace_events": 0,
        "eval_every": 5,
        "run_dir": "runs/a 'quoted' \"name\"",
    }
    experiments = {"dense_delay": 0.5, "straggler": 2.0, "data": "digits"}  # on the CPU back end only
    own = {"model_file": "models/gated.py:GatedSum"}
    deep = {"norm": "layer", "residual": "on", "jumping": "max"}
    gcn, gin = {"source_degree": "out"}, {"model": "gin", "epsilon": "fixed"}
    gat = {
        "model": "gat",
        "heads": 3,
        "output_heads": 2,
        "negative_slope": 0.1,
        "attention_dropout": 0.6,
    }
    placed = {
        "model": "gat",
        "backend": "lambda",
        "place": "ae=lambda",
        "endpoint_url": "http://127.0.0.1:4566",
    }
    assert {*other, *experiments, *own, *deep, *gcn, *gin, *gat, *placed} == set(NAMES)
    for options in (
        other,
        experiments,
        *({"data": "digits", **model} for model in (own, deep, gcn, gin, gat, placed)),
    ):
        wanted = make_config(options)
        assert all(getattr(wanted, name) != getattr(make_config({}), name) for name in options)
        assert parse(*(word for name, value in options.items() for word in (flag(name), value))) == wanted
        assert parse("--config", toml(wanted.to_toml())) == wanted


def test_toml_round_trip(toml):
    for options in ({}, {"lr": 1e-300, "weight_decay": 0.1 + 0.2, "dropout": 1 / 3, "data": "é\\\n\t"}):
        config = make_config(options)
        assert make_config(tomllib.loads(config.to_toml())) == config
        assert make_config(read_config_file(toml(config.to_toml()))) == config
        assert make_config(asdict(config)) == config
        assert make_config(json.loads(json.dumps(asdict(config)))) == config


def test_frozen():
    config = make_config({})
    with pytest.raises(FrozenInstanceError):
        config.epochs = 3
    assert hash(config) == hash(make_config({}))


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("lr", 1, 1.0),
        ("epochs", np.int64(3), 3),
        ("dropout", np.float32(0.5), 0.5),
        ("lr", np.float64(0.25), 0.25),
    ],
)
def test_numbers_become_pythons_own(name, given, kept):
    value = getattr(make_config({name: given}), name)
    assert value == kept and type(value) is type(kept)
    assert tomllib.loads(make_config({name: given}).to_toml())[name] == kept


# ---- what is refused

WRONG = [
    *[("layers", value, "1 to 63") for value in (0, -1, 64)],
    *[("hidden", value, "at least 1") for value in (0, -3)],
    *[(name, value, "[0, 1)") for name in ("dropout", "input_dropout") for value in (-0.1, 1, 1.5, math.nan)],
    *[("lr", value, "a positive number") for value in (0, -0.1, math.nan, math.inf)],
    *[("weight_decay", value, "a number >= 0") for value in (-1e-9, math.nan, math.inf)],
    *[(name, 0, "at least 1") for name in ("epochs", "eval_every")],
    *[(name, -1, "at least 0") for name in ("servers", "intervals", "threads", "workers", "stream_rows")],
    *[("seed", value, "0 to 2^63-1") for value in (-1, 2**63)],
    ("model", "mlp", "one of gcn, sage, gin"),
    ("aggregator", "lstm", "one of mean, gcn, max"),
    ("l2_normalise", "yes", "one of on, off"),
    ("epsilon", "zero", "one of learned, fixed"),
    *[("memory_mb", value, "128 to 10240") for value in (127, 10241)],
    *[("tensor_port", value, "0 to 65535") for value in (-1, 65536)],
    *[("max_workers", value, "1 to 10000") for value in (0, 10001, 10**30)],
    *[("function_timeout", value, "at most 900") for value in (0, -1, 900.1, math.nan, math.inf)],
    *[
        (name, value, "a number >= 0")
        for name in ("budget_usd", "local_latency", "local_bandwidth")
        for value in (-0.01, math.nan, math.inf)
    ],
    *[(name, "yes", "one of on, off") for name in ("tls", "task_fusion", "rematerialisation")],
    ("optimizer", "Adam", "one of adam, sgd"),
    ("decay_scope", "last", "one of first, all"),
    ("feature_norm", "rows", "one of none, row, standard"),
    ("source_degree", "both", "one of in, out"),
    ("dtype", "float16", "one of float32, float64"),
    ("mode", "", "one of nopipe, pipe"),
    ("backend", "gpu", "one of cpu, lambda, lambda-local"),
    ("metric", "f1", "one of auto, accuracy, f1-micro, f1-macro, auc"),
]
WRONG_TYPES = [
    ("epochs", "3", "wants a whole number"),
    ("epochs", 3.0, "wants a whole number"),
    ("epochs", True, "wants a whole number"),
    ("lr", "0.1", "wants a number"),
    ("lr", False, "wants a number"),
    ("lr", [0.1], "wants a number"),
    ("data", 3, "wants text"),
    ("run_dir", {}, "wants text"),
    ("dtype", 32, "wants text"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_values_out_of_range(toml, name, value, said):
    text = json.dumps(value) if isinstance(value, str) else str(value)  # TOML, too, says nan and inf
    for make in (
        lambda: make_config({name: value}),
        lambda: parse("--data", "digits", f"{flag(name)}={value}"),
        lambda: parse("--data", "digits", "--config", toml(f"{name} = {text}\n")),
    ):
        with pytest.raises(InputError) as caught:
            make()
        assert flag(name) in str(caught.value) and said in str(caught.value)
        assert f"got {value!r}" in str(caught.value) or f"got {float(value)!r}" in str(caught.value)


@pytest.mark.parametrize(("name", "value", "said"), WRONG_TYPES)
def test_values_of_wrong_types(toml, name, value, said):
    text = "{}" if value == {} else json.dumps(value)
    with pytest.raises(InputError) as caught:
        make_config({name: value})
    assert str(caught.value) == f"{flag(name)} {said}, got {value!r}"
    path = toml(f"{name} = {text}\n")
    with pytest.raises(InputError) as caught:
        parse("--config", path)
    assert str(caught.value) == f"--config {path}: {flag(name)} {said}, got {value!r}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--epochs", "1.5"], "argument --epochs: invalid int value: '1.5'"),
        (["--epochs", ""], "argument --epochs: invalid int value: ''"),
        (["--lr", "1e-2x"], "argument --lr: invalid float value: '1e-2x'"),
        (["--lr", "1e999"], "--lr must be a positive number, got inf"),
        (["--lr"], "argument --lr: expected one argument"),
        (["--config"], "argument --config: expected one argument"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),  # no abbreviations
        (["-x"], "unrecognized arguments: -x"),
        (["cora.npz"], "unrecognized arguments: cora.npz"),
        (["--data", ""], "--data is missing: name a prepared folder, a FILE.npz, or a data set"),
        (["--data", "\udce9.npz"], r"--data must be valid UTF-8, got '\udce9.npz'"),
    ],
)
def test_wrong_command_lines(words, said):
    with pytest.raises(InputError) as caught:
        parse("--data", "digits", *words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "gatv2", "place": "ae=lambda"}, "--place ae=lambda is for --model gat, not gatv2"),
        ({"model": "gat", "place": "ae=lambda"}, "--place ae=lambda is for --backend lambda or lambda-local"),
        (
            {"model": "gat", "place": "ae=lambda", "backend": "lambda", "attention_dropout": 0.5},
            "--place ae=lambda needs --attention-dropout 0: workers have no masks of edges, got 0.5",
        ),
        ({"place": "ae=edge"}, "--place must be one of auto, ae=server, ae=lambda, got 'ae=edge'"),
        ({"model": "gat", "norm": "layer"}, "--norm is for --model gcn, sage and gin, not for gat"),
        ({"model_file": "m.py", "jumping": "cat"}, "--jumping is for --model gcn, sage and gin, not for"),
        ({"model": "sage", "norm": "layer", "l2_normalise": "on"}, "--norm layer and --l2-normalise on are"),
        ({"model": "gat", "model_file": "m.py"}, "--model-file is in place of --model, but --model is gat"),
        ({"model_file": "m.py", "heads": 2}, "--heads is for --model gat or gatv2, not for a --model-file"),
        ({"weight_update": "interval"}, "--weight-update interval is for --mode async, not pipe"),
        ({"switch_margin": 0.1, "mode": "async"}, "--switch-margin is for --mode async with a --target-acc"),
        ({"switch_margin": 0.1, "target_accuracy": 0.5}, "--switch-margin is for --mode async with a --targ"),
        *[
            (
                {"backend": backend, name: 2.0},
                f"--dense-delay and --straggler are for --backend cpu, not {backend}",
            )
            for backend in ("lambda", "lambda-local")
            for name in ("dense_delay", "straggler")
        ],
        *[
            (
                {"backend": backend, "endpoint_url": "http://a"},
                f"--endpoint-url is for --backend lambda, not {backend}",
            )
            for backend in ("cpu", "lambda-local")
        ],
        ({"workers": 101}, "--workers 101 is more than --max-workers 100"),
        ({"workers": 3, "max_workers": 2, "backend": "lambda"}, "--workers 3 is more than --max-workers 2"),
        *[
            ({"backend": backend, name: value}, f"{flag(name)} is for --backend lambda-local, not {backend}")
            for backend in ("cpu", "lambda")
            for name, value in (
                ("local_latency", 0.1), ("local_bandwidth", 1e6), ("local_faults", "drop=0.1")
            )
        ],
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(toml, options, said):
    with pytest.raises(InputError) as caught:
        make_config(options)
    assert str(caught.value).startswith(said)
    with pytest.raises(InputError) as again:
        parse("--data", "digits", *(word for name, value in options.items() for word in (flag(name), value)))
    assert str(again.value) == str(caught.value)
    path = toml("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    with pytest.raises(InputError) as filed:
        parse("--data", "digits", "--config", path)
    assert str(filed.value) == f"--config {path}: {caught.value}"


def test_options_that_go_together():
    """The limits of what is refused above."""
    make_config({"workers": 100})
    make_config({"workers": 2, "max_workers": 2, "backend": "lambda"})
    make_config({"backend": "lambda", "dense_delay": 0.0, "straggler": 1.0, "local_latency": 0.0})
    make_config({"backend": "lambda-local", "local_latency": 0.1, "local_bandwidth": 1e6, "mode": "async"})
    make_config({"switch_margin": 0.1, "mode": "async", "target_accuracy": 0.5})


def test_no_data():
    with pytest.raises(InputError, match="^--data is missing: name a prepared folder, a FILE.npz, or"):
        parse("--epochs", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epoch = 3", "unknown option 'epoch': did you mean 'epochs'?"),
        ("colour = 1", "unknown option 'colour'"),
        ("run-dir = 'x'", "unknown option 'run-dir': did you mean 'run_dir'?"),
        ("config = 'other.toml'", "unknown option 'config'"),
        ("[train]\nepochs = 3", "unknown option 'train'"),
        ("epochs: 3", "not valid TOML: "),
        ("epochs = 3\nepochs = 4", "not valid TOML: "),
        ("epochs =", "not valid TOML: "),
        ("lr = 1" + 400 * "0", "--lr must be a positive number, got inf"),
        ("epochs = 1" + 5000 * "0", "not valid TOML: "),
        (b"data = '\xe9.npz'", "cannot be read: 'utf-8' codec"),
        (b"\x00\x01", "not valid TOML: "),
    ],
)
def test_wrong_files(toml, text, said):
    path = toml(text)
    with pytest.raises(InputError) as caught:
        parse("--data", "digits", "--config", path)
    message = str(caught.value)
    assert message.startswith(f"--config {path}: {said}") and "\n" not in message


def test_files_that_cannot_be_read(tmp_path):
    for path, said in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError) as caught:
            parse("--data", "digits", "--config", path)
        assert str(caught.value).startswith(f"--config {path}: cannot be read: ")
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "model"),
    [
        ("source_degree", "out", "gcn"),
        ("aggregator", "gcn", "sage"),
        ("l2_normalise", "on", "sage"),
        ("epsilon", "fixed", "gin"),
    ],
)
def test_options_of_one_model(name, value, model):
    assert getattr(make_config({"model": model, name: value}), name) == value
    for other in {"gcn", "sage", "gin"} - {model}:
        with pytest.raises(InputError) as caught:
            make_config({"model": other, name: value})
        assert str(caught.value) == f"{flag(name)} is for --model {model}, not {other}"


# ---- what this version does not have


def test_the_contract_is_whole():
    """Every option of the contract is there or refused by name, and every value is there."""
    ours = {flag(name)[2:] for name in (*NAMES, *UNAVAILABLE_OPTIONS)} | {"config"}
    assert ours == {*CONTRACT, *ADDED}
    assert not set(UNAVAILABLE_OPTIONS) & set(NAMES)
    for option in fields(TrainConfig):
        if option.name in CONTRACT_VALUES:
            assert set(option.metadata["choices"]) == set(CONTRACT_VALUES[option.name])


@pytest.mark.parametrize("name", UNAVAILABLE_OPTIONS)
def test_unavailable_options_are_refused_by_name(toml, name):
    said = f"{flag(name)} is not available in this version"
    for words in ([flag(name)], [flag(name), "3"], [f"{flag(name)}=on"], [flag(name), "-5"]):
        with pytest.raises(InputError) as caught:
            parse("--data", "digits", *words, "--epochs", 3)
        assert str(caught.value) == said
    path = toml(f"{name} = 3\n")
    with pytest.raises(InputError) as caught:
        parse("--data", "digits", "--config", path)
    assert str(caught.value) == f"--config {path}: {said}"


# ---- help


def test_help_names_every_option_once_with_its_default():
    text = train_parser("train").format_help()
    for option in fields(TrainConfig):
        assert len(re.findall(rf"^  {flag(option.name)} ", text, re.MULTILINE)) == 1
        assert option.metadata["help"]
        for choice in option.metadata["choices"] or ():
            assert choice in text
    assert len(re.findall(r"^  --config ", text, re.MULTILINE)) == 1
    flat = " ".join(text.split())
    assert "epochs; default 200 --seed" in flat and "(float32, float64); default float32" in flat
    for word in ("None", "SUPPRESS", *map(flag, UNAVAILABLE_OPTIONS)):
        assert not re.search(rf"{word}\b", text)


def test_parsers_know_no_abbreviations_and_raise():
    parser = make_parser("name", "description")
    parser.add_argument("--weights", choices=("best", "last"))
    assert parser.parse_args(["--weights", "best"]) == argparse.Namespace(weights="best")
    for words in (["--weigh", "best"], ["--weights", "worst"]):
        with pytest.raises(InputError):
            parser.parse_args(words)


# ---- a run repeated from what it left


def test_config_of_a_run_repeats_it(tmp_path):
    write_ring(tmp_path / "ring.npz", n=60, features=5)
    (tmp_path / "own.toml").write_text('data = "ring.npz"\nepochs = 9\nhidden = 6\nlr = 1\nseed = 1\n')
    first = ["--config", "own.toml", "--seed", 7, "--lr", 0.05, "--input-dropout", 0.2, "--servers", 1]
    first += ["--eval-every", 4, "--decay-scope", "all", "--feature-norm", "standard", "--run-dir", "first"]
    cases = {
        "first": ("train", first),
        "again": ("train", ["--config", "first/config.toml", "--run-dir", "again"]),
        "other": ("train", ["--config", "first/config.toml", "--run-dir", "other", "--seed", 8]),
    }
    ended = run_table(3, cases, tmp_path)
    assert [rank.status for ranks in ended.values() for rank in ranks] == 9 * [0]
    summary = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in cases}
    config = summary["first"]["config"]
    assert (config["epochs"], config["hidden"], config["seed"], config["lr"]) == (9, 6, 7, 0.05)
    assert tomllib.loads((tmp_path / "first" / "config.toml").read_text()) == config
    assert min(config["intervals"], config["threads"], config["servers"]) >= 1  # resolved
    assert {**summary["again"]["config"], "run_dir": "first"} == config
    assert summary["again"]["weights_sha256"] == summary["first"]["weights_sha256"]
    assert summary["again"]["loss"] == summary["first"]["loss"]
    assert summary["other"]["weights_sha256"] != summary["first"]["weights_sha256"]
