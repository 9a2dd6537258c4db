"""``python -m dorylus_hpc.prepare``: check a graph, cut it into parts, write them to a folder."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.clean import DUPLICATES, SELF_LOOPS
from dorylus_hpc.graph.order import ORDERS
from dorylus_hpc.graph.preparation import load_graph, prepare_folder


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"prepare: error: {message} (see prepare --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="prepare", description=__doc__.split(": ", 1)[1] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("input", metavar="INPUT", help="an .npz file, or the name of a data set (digits)")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder for the parts")
    parser.add_argument("--parts", type=int, required=True, metavar="K", help="number of parts")
    parser.add_argument(
        "--partitioner",
        default="metis",
        metavar="KIND",
        help="metis (default), range, hash or file:PATH (one part a line)",
    )
    parser.add_argument("--undirected", action="store_true", help="add the missing reverse of every edge")
    parser.add_argument("--self-loops", choices=SELF_LOOPS, default="drop", help="default: %(default)s")
    parser.add_argument("--duplicates", choices=DUPLICATES, default="merge", help="default: %(default)s")
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default="auto",
        help="order of the vertices inside a part; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of partitioner and drawn split; default: 0"
    )
    parser.add_argument(
        "--split", type=int, metavar="I", help="which of the splits in the file; default: its first"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        Exit status: 0, or 2 for wrong input.
    """
    options = build_parser().parse_args(argv)
    try:
        graph = load_graph(options.input, split=options.split, seed=options.seed)
        prepare_folder(
            graph,
            options.output,
            parts=options.parts,
            partitioner=options.partitioner,
            undirected=options.undirected,
            self_loops=options.self_loops,
            duplicates=options.duplicates,
            order=options.order,
            seed=options.seed,
        )
    except InputError as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 2
    folder = shlex.quote(options.output)
    print(f"written to {folder}; train on 1 to {options.parts} graph servers, for example:")
    print(f"  mpirun -n {options.parts} python -m dorylus_hpc.train --data {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
