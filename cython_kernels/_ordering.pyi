from .checks import IntArray

def asymmetry(indptr: IntArray, indices: IntArray) -> int: ...
def sample(indptr: IntArray, indices: IntArray, starts: IntArray, neighbours: IntArray) -> None: ...
def propagate(
    starts: IntArray,
    neighbours: IntArray,
    weights: IntArray,
    mass: IntArray,
    bound: int,
    label: IntArray,
    size: IntArray,
    count: IntArray,
    seed: int,
) -> int: ...
def group(label: IntArray, number: IntArray, first: IntArray, members: IntArray) -> int: ...
def contract(
    starts: IntArray,
    neighbours: IntArray,
    weights: IntArray,
    label: IntArray,
    first: IntArray,
    members: IntArray,
    count: IntArray,
    touched: IntArray,
    new_starts: IntArray,
    new_neighbours: IntArray,
    new_weights: IntArray,
) -> None: ...
def misses(
    indptr: IntArray,
    indices: IntArray,
    order: IntArray,
    last: IntArray,
    windows: int,
    length: int,
    reaches: IntArray,
    missed: IntArray,
) -> int: ...
