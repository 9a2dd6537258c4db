"""The configuration of a training run: one frozen object, made in one place.

Options come from three places, later ones winning: the defaults below, a TOML file (``--config``), the
command line. Unknown keys fail; so do, by name, options of the contract that this version does not have.
"""

from __future__ import annotations

import argparse
import difflib
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import tomli_w

from dorylus_hpc.errors import InputError

_NOT_YET = "is not available in this version"

# Options of the command line's contract whose feature does not exist yet: refused by name.
UNAVAILABLE_OPTIONS = (
    "halo_dtype",
    "checkpoint_every",
    "resume",
    "on_loss",
)


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    check: tuple[str, Callable[[Any], bool]] | None = None,
) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "check": check})


_COUNT = ("at least 0", lambda value: value >= 0)
_POSITIVE_COUNT = ("at least 1", lambda value: value >= 1)
_PROBABILITY = ("in [0, 1)", lambda value: 0 <= value < 1)
_POSITIVE = ("a positive number", lambda value: 0 < value < math.inf)
_SWITCH = ("on", "off")
_NOT_NEGATIVE = ("a number >= 0", lambda value: 0 <= value < math.inf)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run. Field names are the command line's, with underscores.

    Raises
    ------
    InputError
        A value is of the wrong type, out of range, or not available in this version.
    """

    data: str = _option("", "prepared folder, FILE.npz, or the name of a data set (digits)")
    model: str = _option("gcn", "model", choices=("gcn", "sage", "gin", "gat", "gatv2"))
    model_file: str = _option("", "FILE.py or FILE.py:NAME with a model of your own, in place of --model")
    aggregator: str = _option(
        "mean", "sage: what a vertex takes from its neighbours", choices=("mean", "gcn", "max")
    )
    l2_normalise: str = _option("off", "sage: rows of hidden layers have norm 1", choices=_SWITCH)
    epsilon: str = _option(
        "learned",
        "gin: what is added to the 1 that a vertex itself counts: learned, or 0",
        choices=("learned", "fixed"),
    )
    heads: int = _option(
        8, "gat: heads of the hidden layers, of --hidden columns each", check=_POSITIVE_COUNT
    )
    output_heads: int = _option(1, "gat: heads of the last layer, whose mean it is", check=_POSITIVE_COUNT)
    negative_slope: float = _option(0.2, "gat: slope of LeakyReLU below zero", check=_NOT_NEGATIVE)
    attention_dropout: float = _option(0.0, "gat: dropout on the weights of edges", check=_PROBABILITY)
    norm: str = _option(
        "none",
        "gcn, sage, gin: hidden layers have a layer norm before ReLU, or a batch norm over all vertices",
        choices=("none", "layer", "batch"),
    )
    residual: str = _option("off", "gcn, sage, gin: hidden layers add their input", choices=_SWITCH)
    jumping: str = _option(
        "none",
        "gcn, sage, gin: the last layer takes all hidden layers, side by side or the largest values",
        choices=("none", "cat", "max"),
    )
    layers: int = _option(2, "number of layers", check=("1 to 63", lambda value: 1 <= value <= 63))
    hidden: int = _option(64, "width of the hidden layers", check=_POSITIVE_COUNT)
    dropout: float = _option(0.5, "dropout on hidden layers", check=_PROBABILITY)
    input_dropout: float = _option(0.0, "dropout on the features", check=_PROBABILITY)
    lr: float = _option(0.01, "learning rate", check=_POSITIVE)
    optimizer: str = _option("adam", "optimizer", choices=("adam", "sgd"))
    weight_decay: float = _option(5e-4, "L2 weight decay, on weight matrices", check=_NOT_NEGATIVE)
    decay_scope: str = _option("first", "layers with weight decay", choices=("first", "all"))
    feature_norm: str = _option("none", "normalisation of features", choices=("none", "row", "standard"))
    source_degree: str = _option(
        "in", "degree that normalises the source end of a directed edge", choices=("in", "out")
    )
    layer_order: str = _option(
        "auto",
        "gather before the product of a layer or after it; auto: whichever gathers and sends fewer columns",
        choices=("auto", "aggregate-first", "transform-first"),
    )
    constant_aggregate: str = _option(
        "on", "what a first layer gathers is computed once, if nothing changes it", choices=_SWITCH
    )
    ghost_products: str = _option(
        "auto",
        "gat, gatv2: layer 1's products of ghosts are exchanged, or computed by all ranks that read them; "
        "auto: what should take less time",
        choices=("auto", "exchange", "compute"),
    )
    save_memory: str = _option(
        "on",
        "arrays make way for others once nothing reads them: features for what is gathered of them",
        choices=_SWITCH,
    )
    dtype: str = _option("float32", "arithmetic", choices=("float32", "float64"))
    epochs: int = _option(200, "epochs", check=_POSITIVE_COUNT)
    seed: int = _option(
        0, "seed of start weights and dropout", check=("0 to 2^63-1", lambda v: 0 <= v < 2**63)
    )
    servers: int = _option(
        0, "ranks that are parameter servers; 0: graph servers hold the weights", check=_COUNT
    )
    intervals: int = _option(0, "vertex intervals a part; 0: chosen by a static cost model", check=_COUNT)
    threads: int = _option(0, "threads a graph server; 0: its share of the machine's cores", check=_COUNT)
    mode: str = _option(
        "pipe",
        "schedule: stage by stage, each task when its inputs are there, or with stale inputs within a bound",
        choices=("nopipe", "pipe", "async"),
    )
    staleness: int = _option(
        1, "async: epochs that an interval may be ahead of the slowest one anywhere", check=_COUNT
    )
    weight_update: str = _option(
        "epoch",
        "weights change when all gradients of an epoch are there, or (async only) with each interval's",
        choices=("epoch", "interval"),
    )
    target_accuracy: float = _option(
        0.0,
        "validation accuracy, or other metric, at which to stop; 0: never",
        check=("in [0, 1]", lambda value: 0 <= value <= 1),
    )
    metric: str = _option(
        "auto",
        "what the best weights, the target and patience go by; auto: f1-micro where vertices have several "
        "classes, accuracy otherwise",
        choices=("auto", "accuracy", "f1-micro", "f1-macro", "auc"),
    )
    class_weights: str = _option(
        "none", "weights of classes in the loss: none, balanced, or a file with a number a class"
    )
    patience: int = _option(
        0, "stop after so many epochs without a better validation metric; 0: never", check=_COUNT
    )
    switch_margin: float = _option(
        0.0,
        "async: go on in pipe when the validation metric is so close to the target; 0: never",
        check=("in [0, 1]", lambda value: 0 <= value <= 1),
    )
    dense_delay: float = _option(
        0.0, "experiments: seconds added to each dense task, as if its worker were far", check=_NOT_NEGATIVE
    )
    straggler: float = _option(
        1.0,
        "experiments: times as long a quarter of the tasks of the last graph server take",
        check=("a number >= 1", lambda value: 1 <= value < math.inf),
    )
    eval_every: int = _option(1, "epochs between evaluations", check=_POSITIVE_COUNT)
    backend: str = _option(
        "cpu",
        "where dense tasks run: on the graph servers' cores, in AWS Lambda, or in a local service like it",
        choices=("cpu", "lambda", "lambda-local"),
    )
    function: str = _option("dorylus-hpc", "name or ARN of the Lambda function")
    region: str = _option("", "AWS region; default that of the machine's AWS configuration")
    endpoint_url: str = _option("", "another service than AWS with the same interface")
    memory_mb: int = _option(
        1769,
        "memory of the function, MB; 1769 is one core",
        check=("128 to 10240", lambda v: 128 <= v <= 10240),
    )
    function_timeout: float = _option(
        60.0,
        "timeout of the function, seconds",
        check=("more than 0 and at most 900, as at AWS", lambda v: 0 < v <= 900),
    )
    max_workers: int = _option(
        100,
        "Lambda invocations a graph server at once, at most",
        check=("1 to 10000", lambda v: 1 <= v <= 10000),
    )
    workers: int = _option(
        0, "Lambda invocations a graph server at once; 0: found by the autotuner", check=_COUNT
    )
    place: str = _option(
        "auto",
        "gat on Lambda: attention over edges on the graph server or on the workers; auto: by an estimate",
        choices=("auto", "ae=server", "ae=lambda"),
    )
    tls: str = _option(
        "on", "encryption between Lambda and the servers; off on loopback only", choices=_SWITCH
    )
    tensor_host: str = _option(
        "", "address under which Lambda reaches this rank; default that of its route out"
    )
    tensor_port: int = _option(
        0,
        "first port of the tensor servers, one a rank of a node; 0: any",
        check=("0 to 65535", lambda v: 0 <= v < 65536),
    )
    task_fusion: str = _option(
        "on", "the last layer's forward and backward are one invocation", choices=_SWITCH
    )
    rematerialisation: str = _option(
        "on", "backward invocations compute again what they would have to fetch", choices=_SWITCH
    )
    stream_rows: int = _option(
        0, "rows that a worker fetches while it computes on those before; 0: a whole interval", check=_COUNT
    )
    budget_usd: float = _option(
        0.0, "cost of Lambda after which the servers' own cores go on; 0: no limit", check=_NOT_NEGATIVE
    )
    instance_type: str = _option("", "EC2 type of the ranks, to price them; default not priced")
    prices: str = _option("", "TOML file with prices other than the built-in ones")
    local_latency: float = _option(
        0.0, "lambda-local: seconds of a round trip between worker and server", check=_NOT_NEGATIVE
    )
    local_bandwidth: float = _option(
        0.0, "lambda-local: bytes a second of a worker in each direction; 0: no limit", check=_NOT_NEGATIVE
    )
    local_faults: str = _option("", "lambda-local, experiments: faults to inject, such as drop=0.1,seed=3")
    trace_events: int = _option(
        50_000, "events a rank in the timeline trace.json, the first ones; 0: no timeline", check=_COUNT
    )
    run_dir: str = _option("", "folder for results; default runs/NAME")

    def __post_init__(self) -> None:
        """Check every value by itself."""
        hints = get_type_hints(type(self))
        for option in fields(self):
            object.__setattr__(
                self, option.name, _checked(option, hints[option.name], getattr(self, option.name))
            )

        self._check_together()

    def _check_together(self) -> None:
        if self.model_file and self.model != _default("model"):
            raise InputError(f"--model-file is in place of --model, but --model is {self.model}: give one")
        for name, models in _OF_SOME_MODELS.items():
            if getattr(self, name) == _default(name):
                continue
            if self.model_file and name != "source_degree":
                raise InputError(
                    f"{_flag(name)} is for --model {' or '.join(models)}, not for a --model-file"
                )
            if self.model not in models:
                raise InputError(f"{_flag(name)} is for --model {' or '.join(models)}, not {self.model}")
        for name in _NOT_OF_ATTENTION:
            if (self.model in _ATTENTION or self.model_file) and getattr(self, name) != _default(name):
                other = "a --model-file" if self.model_file else self.model
                raise InputError(f"{_flag(name)} is for --model gcn, sage and gin, not for {other}")
        if self.norm != "none" and self.l2_normalise == "on":
            raise InputError(
                f"--norm {self.norm} and --l2-normalise on are two norms of the same rows: give one"
            )
        if self.norm == "batch" and self.mode == "async":
            raise InputError(
                "--norm batch is for --mode pipe or nopipe: its means and variances are those of all "
                "vertices in one epoch, so that no interval can be ahead; --norm layer is of each row alone"
            )
        if self.model == "gatv2" and self.mode == "async":
            raise InputError(
                "--model gatv2 is for --mode pipe or nopipe: its backward reads rows of its forward"
            )
        if self.place == "ae=lambda":
            self._check_place()
        if self.weight_update == "interval" and self.mode != "async":
            raise InputError(f"--weight-update interval is for --mode async, not {self.mode}")
        if self.backend != "cpu" and (self.dense_delay or self.straggler != 1.0):
            raise InputError(f"--dense-delay and --straggler are for --backend cpu, not {self.backend}")
        if self.workers > self.max_workers:
            raise InputError(f"--workers {self.workers} is more than --max-workers {self.max_workers}")
        for name in ("local_latency", "local_bandwidth", "local_faults"):
            if getattr(self, name) and self.backend != "lambda-local":
                raise InputError(f"{_flag(name)} is for --backend lambda-local, not {self.backend}")
        if self.endpoint_url and self.backend != "lambda":
            raise InputError(f"--endpoint-url is for --backend lambda, not {self.backend}")
        if self.switch_margin and (self.mode != "async" or not self.target_accuracy):
            raise InputError("--switch-margin is for --mode async with a --target-accuracy")

    @property
    def may_place_edges(self) -> bool:
        """Whether attention over edges can be a worker's."""
        return self.model == "gat" and self.backend != "cpu" and not self.attention_dropout

    def _check_place(self) -> None:
        if self.model != "gat":
            raise InputError(f"--place ae=lambda is for --model gat, not {self.model}")
        if self.backend == "cpu":
            raise InputError("--place ae=lambda is for --backend lambda or lambda-local, not cpu")
        if self.attention_dropout:
            raise InputError(
                "--place ae=lambda needs --attention-dropout 0: workers have no masks of edges, got "
                f"{self.attention_dropout}"
            )

    def to_toml(self) -> str:
        """Return the configuration as TOML: a valid ``--config`` file."""
        return tomli_w.dumps(asdict(self))


_ATTENTION = ("gat", "gatv2")
# Options that are some models' own.
_OF_SOME_MODELS = {
    "source_degree": ("gcn",),
    "aggregator": ("sage",),
    "l2_normalise": ("sage",),
    "epsilon": ("gin",),
    "heads": _ATTENTION,
    "output_heads": _ATTENTION,
    "negative_slope": _ATTENTION,
    "attention_dropout": _ATTENTION,
}


_NOT_OF_ATTENTION = ("norm", "residual", "jumping")


def _default(name: str) -> Any:
    return next(option.default for option in fields(TrainConfig) if option.name == name)


def _checked(option: Any, kind: type, value: Any) -> Any:
    """Return a value in the option's type, or refuse it."""
    flag = _flag(option.name)
    if isinstance(value, bool) or not isinstance(value := _plain(kind, value), kind):
        raise InputError(f"{flag} wants {_KINDS[kind]}, got {value!r}")
    if (
        isinstance(value, str) and value.encode(errors="replace").decode() != value
    ):  # config.toml could not hold it
        raise InputError(f"{flag} must be valid UTF-8, got {value!r}")
    choices, check = option.metadata["choices"], option.metadata["check"]
    if choices is not None and value not in choices:
        raise InputError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")
    if check is not None and not check[1](value):
        raise InputError(f"{flag} must be {check[0]}, got {value!r}")
    return value


def _plain(kind: type, value: Any) -> Any:
    """Return a number in the option's type: a whole one is a float too, and NumPy's are Python's."""
    if kind is int and isinstance(value, Integral):
        return int(value)
    if kind is float and isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return value


_KINDS = {int: "a whole number", float: "a number", str: "text"}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_config(options: Mapping[str, Any]) -> TrainConfig:
    """Make a configuration from options by name.

    Raises
    ------
    InputError
        A name is unknown or its feature not available in this version, or a value is refused.
    """
    known = {option.name for option in fields(TrainConfig)}
    for name in options:
        if name in UNAVAILABLE_OPTIONS:
            raise InputError(f"{_flag(name)} {_NOT_YET}")
        if name not in known:
            raise InputError(f"unknown option {name!r}{_suggestion(name, known)}")
    return TrainConfig(**options)


def _suggestion(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the options of a TOML file.

    Raises
    ------
    InputError
        The file is missing, not TOML, or names an option that does not exist.
    """
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: cannot be read: {error}") from error
    except ValueError as error:
        raise InputError(f"--config {path}: not valid TOML: {error}") from error
    try:
        make_config(options)
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from error
    return options


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting: every rank parses, one of them speaks."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser whose errors are `InputError` and that knows no abbreviations."""
    return _Parser(prog=program, description=description, allow_abbrev=False)


def train_parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the command line of ``train``."""
    parser = make_parser(program, "Train a GNN on a whole graph, on all ranks that mpirun started.")
    hints = get_type_hints(TrainConfig)
    for option in fields(TrainConfig):
        text = option.metadata["help"]
        choices = option.metadata["choices"]
        if choices:
            text += f" ({', '.join(choices)})"
        if option.default not in ("", None):
            text += f"; default {option.default}"
        parser.add_argument(
            _flag(option.name),
            dest=option.name,
            type=hints[option.name],
            default=argparse.SUPPRESS,
            metavar=option.name.upper(),
            help=text,
        )
    parser.add_argument(
        "--config", default=argparse.SUPPRESS, metavar="FILE.toml", help="options from a file"
    )
    for name in UNAVAILABLE_OPTIONS:
        parser.add_argument(
            _flag(name), dest=name, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def parse_train(argv: Sequence[str], program: str) -> TrainConfig:
    """Make the configuration of a command line.

    Parameters
    ----------
    argv
        Arguments, without the program's name.
    program
        For messages.

    Raises
    ------
    InputError
        Anything is wrong with them.
    SystemExit
        Help was asked for (status 0, after printing it).
    """
    options = vars(train_parser(program).parse_args(argv))
    path = options.pop("config", None)
    if path is not None:
        options = read_config_file(Path(path)) | options
    config = make_config(options)
    if not config.data:
        raise InputError(
            "--data is missing: name a prepared folder, a FILE.npz, or a data set such as digits"
        )
    return config
