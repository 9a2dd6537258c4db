"""What the doors refuse, and that a refused call has written nothing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import cython_kernels as ck
from cython_kernels import reference
from cython_kernels.layout import empty_tiles

I32, I64, F32, F64, U16 = np.int32, np.int64, np.float32, np.float64, np.uint16
LAYOUTS = {"Tiles", "choose_layout", "from_tiles", "to_tiles"}  # tests/test_kernels_layout.py
SAVED = {"AttentionSaved", "attention_saved"}  # tests/test_kernels_attention.py
SAVED |= {"AttentionV2Saved", "attention_v2_saved"}  # tests/test_kernels_attention_v2.py
TURNED = {"Transposed"}  # tests/test_kernels_transpose.py
ATTENTION_V2 = ["attention_v2", "attention_v2_targets", "attention_v2_adjoint"]
KEY = {"seed": 1, "epoch": 1, "layer": 1}
N, F, NNZ, N_COLS, H = 3, 4, 4, 5, 2


def good():
    """Arguments that every door accepts, by the name of the door; made anew so that a test may spoil them."""
    indptr, indices, data = np.array([0, 2, 2, 4], I64), np.array([0, 4, 1, 1], I32), np.arange(1.0, 5.0)
    x, gids, index = np.ones((N_COLS, F)), np.arange(N), np.array([4, 0, 2], I32)
    csr = {"indptr": indptr, "indices": indices, "data": data}
    scales = {"row_scale": np.ones(N), "source_scale": np.ones(N_COLS), "self_weight": 1.0, "rows": (0, N)}
    dropping = {"gids": gids, "p": 0.5, **KEY}
    threads = {"num_threads": 2}
    small = np.ones((N, F))
    attending = {"indptr": indptr, "indices": indices} | {
        "slope": 0.2, "source_gids": np.arange(N_COLS), "target_gids": gids, "p": 0.5, "rows": (0, N), **KEY
    }  # fmt: skip
    scores = {"score_source": np.ones((N_COLS, H)), "score_target": np.ones((N, H))}
    saved, saved_v2 = ck.attention_saved(N, H, F, F64), ck.attention_v2_saved(N, H, F64)
    return {
        "check_csr": csr | {"n_cols": N_COLS},
        "gather": csr | {"x": x, "out": np.zeros((N, F))} | scales | threads,
        "gather_adjoint": csr
        | {"d_out": small, "d_x": np.zeros((N_COLS, F)), "n_sources": N_COLS}
        | scales
        | threads,
        "gather_max": {"indptr": indptr, "indices": indices, "x": x, "out": np.zeros((N, F))}
        | {"source": np.zeros((N, F), I32), "rows": (0, N)}
        | threads,
        "gather_max_adjoint": {"source": np.array([[0, 4, -1, 1]] * N, I32), "d_out": small}
        | {"d_x": np.zeros((N_COLS, F)), "n_sources": N_COLS, "rows": (0, N)}
        | threads,
        "gather_max_pull": {"indptr": indptr, "indices": indices, "packed": np.ones((N_COLS, 2 * F))}
        | {"ids": gids, "d_x": np.zeros((N, F)), "rows": (0, N)}
        | threads,
        "pack_max": {"source": np.array([[0, 4, -1, 1]] * N, I32), "d_out": small, "ids": np.arange(N_COLS)}
        | {"out": np.zeros((N, 2 * F)), "rows": (0, N)}
        | threads,
        "narrow_product": {"a": small, "b": np.ones((F, 2)), "out": np.zeros((N, 2))} | threads,
        "narrow_product_adjoint": {"a": small, "d_out": np.ones((N, 2)), "d_b": np.zeros((F, 2))} | threads,
        "attention": attending | {"x": x, "out": np.zeros((N, F)), "saved": saved} | scores | threads,
        "attention_weights": attending | {"out": np.zeros((NNZ, H))} | scores | threads,
        "attention_targets": {"out": small.copy(), "d_out": small, "score_target": np.ones((N, H))}
        | {"saved": saved, "d_score_target": np.zeros((N, H)), "record": np.zeros((N, 4, H))}
        | {"slope": 0.2, "rows": (0, N)}
        | threads,
        "attention_adjoint": attending
        | {"x": small, "score_source": np.ones((N, H)), "record": np.ones((N_COLS, 4, H)), "d_out": x}
        | {"d_x": np.zeros((N, F)), "d_score_source": np.zeros((N, H))}
        | {"source_gids": gids, "target_gids": np.arange(N_COLS)}
        | threads,
        "attention_v2": attending
        | {"left": x, "right": small, "a": np.ones((H, F // H)), "out": np.zeros((N, F)), "saved": saved_v2}
        | threads,
        "attention_v2_targets": attending
        | {"left": x, "right": small, "a": np.ones((H, F // H)), "out": small.copy(), "d_out": small}
        | {"saved": saved_v2, "d_right": np.zeros((N, F)), "d_a": np.zeros((H, F // H))}
        | {"record": np.zeros((N, 3, H))}
        | threads,
        "attention_v2_adjoint": attending
        | {"left": small, "right": x, "a": np.ones((H, F // H)), "record": np.ones((N_COLS, 3, H))}
        | {"d_out": x, "d_left": np.zeros((N, F)), "source_gids": gids, "target_gids": np.arange(N_COLS)}
        | threads,
        "to_bfloat16": {"x": np.ones((N, F), F32), "out": np.zeros((N, F), U16)} | threads,
        "from_bfloat16": {"x": np.ones((N, F), U16), "out": np.zeros((N, F), F32)} | threads,
        "pack_rows": {"x": x, "index": index, "out": np.zeros((N, F))} | threads,
        "unpack_rows": {"rows": small, "index": index, "out": np.zeros((N_COLS, F))} | threads,
        "scatter_add_rows": {"rows": small, "index": index, "out": np.zeros((N_COLS, F))} | threads,
        "dropout": {"x": small, "out": np.zeros((N, F))} | dropping | threads,
        "dropout_csr": csr | {"out": np.zeros(NNZ)} | dropping | threads,
        "bias_relu_dropout": {"z": small, "bias": np.ones(F), "out": np.zeros((N, F))}
        | {"row_scale": np.ones(N)}
        | dropping
        | threads,
        "relu_dropout_backward": {
            "d_out": small,
            "activated": np.ones((N, F)),
            "p": 0.5,
            "row_scale": np.ones(N),
            "out": np.zeros((N, F)),
        }
        | threads,
        "bias_elu_dropout": {"x": small, "bias": np.ones(F), "out": np.zeros((N, F))} | dropping | threads,
        "elu_dropout_backward": {"d_h": small, "h": np.ones((N, F)), "out": np.zeros((N, F))}
        | dropping
        | threads,
        "transpose_csr": {"indptr": indptr, "indices": indices, "n_cols": N_COLS} | threads,
        "softmax_cross_entropy": {
            "logits": small,
            "labels": np.array([0, -1, 3], I32),
            "mask": np.array([1, 0, 1], np.uint8),
            "class_weights": np.ones(F),
            "d_logits": np.zeros((N, F)),
        }
        | threads,
        "sigmoid_cross_entropy": {
            "logits": small,
            "labels": np.array([[0, 1, 1, 255], [9] * F, [0] * F], np.uint8),
            "mask": np.array([1, 0, 1], np.uint8),
            "pos_weight": np.ones(F),
            "d_logits": np.zeros((N, F)),
        }
        | threads,
    }


OUTPUT = dict.fromkeys(good(), "out") | {
    "gather_adjoint": "d_x",
    "gather_max_adjoint": "d_x",
    "gather_max_pull": "d_x",
    "narrow_product_adjoint": "d_b",
    "attention_targets": "d_score_target",
    "attention_adjoint": "d_x",
    "attention_v2_targets": "d_right",
    "attention_v2_adjoint": "d_left",
    "sigmoid_cross_entropy": "d_logits",
    "softmax_cross_entropy": "d_logits",
}
del OUTPUT["check_csr"], OUTPUT["transpose_csr"]
# What may be the output itself; the output must be apart from every other array.
IN_PLACE = {
    "dropout": {"x"},
    "dropout_csr": {"data"},
    "bias_relu_dropout": {"z"},
    "relu_dropout_backward": {"d_out", "activated"},
    "bias_elu_dropout": {"x"},
    "elu_dropout_backward": {"d_h", "h"},
    "sigmoid_cross_entropy": {"logits"},
    "softmax_cross_entropy": {"logits"},
}
ARRAYS = [
    (door, name)
    for door, args in good().items()
    for name, value in args.items()
    if isinstance(value, np.ndarray)
]
FLOATS = [(door, name) for door, name in ARRAYS if good()[door][name].dtype == F64]
# The array that sets the dtype is not wrong by having another one; the rest then is.
FIRST_FLOAT = {
    "check_csr": "data",
    "gather": "x",
    "gather_adjoint": "d_out",
    "gather_max": "x",
    "gather_max_adjoint": "d_out",
    "gather_max_pull": "packed",
    "pack_max": "d_out",
    "narrow_product": "a",
    "narrow_product_adjoint": "a",
    "attention": "x",
    "attention_weights": "score_source",
    "attention_targets": "out",
    "attention_adjoint": "x",
    "attention_v2": "left",
    "attention_v2_targets": "left",
    "attention_v2_adjoint": "left",
    "pack_rows": "x",
    "unpack_rows": "rows",
    "scatter_add_rows": "rows",
    "dropout": "x",
    "dropout_csr": "data",
    "bias_relu_dropout": "z",
    "relu_dropout_backward": "d_out",
    "bias_elu_dropout": "x",
    "elu_dropout_backward": "d_h",
    "sigmoid_cross_entropy": "logits",
    "softmax_cross_entropy": "logits",
}


def refused(door, error, match, **changes):
    """Call a door with some arguments changed; it must refuse and leave its output alone."""
    args = good()[door] | changes
    output = args.get(OUTPUT.get(door))
    before = output.copy() if isinstance(output, np.ndarray) else None
    with pytest.raises(error, match=match):
        getattr(ck, door)(**args)
    if before is not None:
        np.testing.assert_array_equal(output, before)


@pytest.mark.parametrize("door", good())
def test_good_arguments_are_accepted(door):
    getattr(ck, door)(**good()[door])
    getattr(reference, door)(**good()[door])


@pytest.mark.parametrize("door", [*good(), "philox4x32"])
def test_the_twin_takes_the_same_arguments(door):
    assert inspect.signature(getattr(ck, door)) == inspect.signature(getattr(reference, door))


def test_every_door_is_covered_here():
    assert set(good()) == set(ck.__all__) - {"build_info", "philox4x32", *LAYOUTS, *SAVED, *TURNED}


@pytest.mark.parametrize(("door", "name"), ARRAYS)
def test_not_an_array(door, name):
    refused(
        door, TypeError, rf"{name} must be a NumPy array, got a list", **{name: good()[door][name].tolist()}
    )


@pytest.mark.parametrize(("door", "name"), ARRAYS)
def test_a_masked_array(door, name):
    """Its minimum is that of what is not masked: an index behind the mask would be read unchecked."""
    masked = np.ma.masked_array(good()[door][name])
    refused(door, TypeError, rf"{name} must be a NumPy array, got a MaskedArray", **{name: masked})


def test_more_threads_than_the_system_has():
    x = np.arange(12, dtype=F32).reshape(3, 4)
    np.testing.assert_array_equal(ck.from_bfloat16(ck.to_bfloat16(x, num_threads=2**31 - 1)), x)


@pytest.mark.parametrize(("door", "name"), ARRAYS)
def test_dtype(door, name):
    refused(
        door,
        TypeError,
        rf"{name} must be .*, got a int16 array",
        **{name: good()[door][name].astype(np.int16)},
    )
    swapped = good()[door][name].astype(good()[door][name].dtype.newbyteorder())
    if swapped.dtype != good()[door][name].dtype:
        refused(door, TypeError, f"{name} must be", **{name: swapped})


@pytest.mark.parametrize(("door", "name"), FLOATS)
def test_one_floating_dtype_for_a_call(door, name):
    if name != FIRST_FLOAT[door]:
        refused(
            door,
            TypeError,
            f"{name} must be float64, got a float32",
            **{name: good()[door][name].astype(F32)},
        )


ANY_SHAPE = {("to_bfloat16", "x"), ("from_bfloat16", "x")}


@pytest.mark.parametrize(("door", "name"), [pair for pair in ARRAYS if pair not in ANY_SHAPE])
def test_dimensions(door, name):
    refused(door, ValueError, rf"{name} must have \d dimension", **{name: good()[door][name][..., None]})


@pytest.mark.parametrize(("door", "name"), ARRAYS)
def test_layout(door, name):
    value = good()[door][name]
    strided = np.repeat(value, 2, axis=-1)[..., ::2]
    refused(door, ValueError, rf"{name} must be C-contiguous", **{name: strided})
    raw = np.zeros(value.nbytes + 1, np.uint8)[1:].view(value.dtype).reshape(value.shape)
    if value.itemsize > 1:
        refused(door, ValueError, rf"{name} must be C-contiguous and aligned", **{name: raw})


APART_ROWS = {
    "attention": {"x", "score_source"},
    "attention_weights": {"score_source"},
    "attention_targets": {"d_out", "record"},
    "attention_adjoint": {"x", "score_source", "record", "d_out", "d_x", "d_score_source"},
    "attention_v2": {"left", "right"},
    "attention_v2_targets": {"left", "right", "d_out", "d_right", "record"},
    "attention_v2_adjoint": {"left", "right", "record", "d_out", "d_left"},
}


@pytest.mark.parametrize(("door", "name"), [pair for pair in ARRAYS if good()[pair[0]][pair[1]].ndim > 1])
def test_columns_of_a_wider_matrix(door, name):
    value = good()[door][name]
    match = f"{name} must be C-contiguous and aligned"
    wider = np.concatenate([value, value], axis=1)
    columns = wider[:, : value.shape[1]]
    if name in APART_ROWS.get(door, ()):
        getattr(ck, door)(**good()[door] | {name: columns})
        getattr(reference, door)(**good()[door] | {name: columns})
        match += ", or columns of a matrix that is, got .* with strides"
    else:
        refused(door, ValueError, match, **{name: columns})
    step = wider[0].nbytes + 4
    raw = np.zeros(len(value) * step, np.uint8)
    odd = np.ndarray(value.shape, value.dtype, raw, strides=(step, *value.strides[1:]))
    for wrong in (
        columns[::-1],
        np.broadcast_to(value[:1], value.shape),
        np.asfortranarray(value),
        np.lib.stride_tricks.as_strided(value, strides=(value.strides[0] - 8, *value.strides[1:])),
        np.repeat(value, 2, axis=1)[:, ::2],
        *([odd] if value.itemsize == 8 else []),
    ):
        refused(door, ValueError, match, **{name: wrong})


def test_columns_of_one_matrix_are_apart_if_they_are_different_ones():
    step = F + H + 1
    memory = np.zeros((N + 2) * step)

    def columns(first, width, step=step):
        return np.ndarray((N, width), F64, memory, offset=8 * first, strides=(8 * step, 8))

    want = ck.attention_adjoint(**good()["attention_adjoint"])
    for first, second in ((0, F), (0, F + 1), (H, 0), (H + 1, 0), (H + 1, step), (0, step + F)):
        d_x, d_source = columns(first, F), columns(second, H)
        args = good()["attention_adjoint"] | {"d_x": d_x, "d_score_source": d_source}
        for got, right in zip(ck.attention_adjoint(**args), want, strict=True):
            np.testing.assert_array_equal(got, right)
        memory[:] = 0
    for first, second in ((0, 0), (0, F - 1), (0, step - 1), (H, 1), (step - 1, 0), (1, step), (0, 2 * step)):
        refused(
            "attention_adjoint", ValueError, "d_x must not share memory with d_score_source",
            d_x=columns(first, F), d_score_source=columns(second, H),
        )  # fmt: skip
    refused(  # of matrices of other widths, whose rows meet somewhere
        "attention_adjoint", ValueError, "d_x must not share memory with d_score_source",
        d_x=columns(0, F), d_score_source=columns(F, H, step + 1),
    )  # fmt: skip
    refused(
        "attention_adjoint", ValueError, "d_x must not share memory with source_gids",
        d_x=columns(0, F), source_gids=memory[F : F + N].view(I64),
    )  # fmt: skip


MORE_OUTPUTS = {
    "attention": {"saved"},
    "attention_v2": {"saved"},
    "gather_max": {"source"},
    "attention_targets": {"record"},
    "attention_adjoint": {"d_score_source"},
    "attention_v2_targets": {"d_a", "record"},
}


@pytest.mark.parametrize("door", good())
def test_read_only_inputs(door):
    """As those of a memory map are, or what `numpy.broadcast_to` and JAX give out."""
    args = good()[door]
    for name, value in args.items():
        if name != OUTPUT.get(door) and name not in MORE_OUTPUTS.get(door, ()):
            for array in value if isinstance(value, tuple) and name == "saved" else (value,):
                if isinstance(array, np.ndarray):
                    array.setflags(write=False)
    getattr(ck, door)(**args)


@pytest.mark.parametrize(("door", "name"), OUTPUT.items())
def test_a_read_only_output(door, name):
    value = good()[door][name]
    value.flags.writeable = False
    refused(door, ValueError, rf"{name} must be writable", **{name: value})


@pytest.mark.parametrize(
    ("door", "name", "shape"),
    [
        ("check_csr", "data", (NNZ + 1,)),
        ("gather", "data", (NNZ - 1,)),
        ("gather", "out", (N + 1, F)),
        ("gather", "out", (N, F - 1)),
        ("gather", "row_scale", (N_COLS,)),
        ("gather", "source_scale", (N,)),
        ("gather_adjoint", "data", (NNZ - 1,)),
        ("gather_adjoint", "d_out", (N + 1, F)),
        ("gather_adjoint", "d_x", (N, F)),
        ("gather_adjoint", "d_x", (N_COLS, F + 1)),
        ("gather_adjoint", "row_scale", (N_COLS,)),
        ("gather_adjoint", "source_scale", (N,)),
        ("gather_max", "out", (N, F + 1)),
        ("gather_max", "source", (N_COLS, F)),
        ("gather_max_adjoint", "source", (N, F + 1)),
        ("gather_max_adjoint", "d_x", (N, F)),
        ("attention", "score_source", (N, H)),
        ("attention", "score_target", (N_COLS, H)),
        ("attention", "score_target", (N, H + 1)),
        ("attention", "out", (N, F + 1)),
        ("attention", "source_gids", (N,)),
        ("attention", "target_gids", (N_COLS,)),
        ("attention_weights", "score_target", (N, H + 1)),
        ("attention_weights", "out", (NNZ, H + 1)),
        ("attention_weights", "target_gids", (N_COLS,)),
        ("attention_targets", "d_out", (N, F + 1)),
        ("attention_targets", "score_target", (N + 1, H)),
        ("attention_targets", "d_score_target", (N, H + 1)),
        ("attention_targets", "record", (N, 3, H)),
        ("attention_adjoint", "x", (N + 1, F)),
        ("attention_adjoint", "d_out", (N_COLS, F + 1)),
        ("attention_adjoint", "record", (N_COLS + 1, 4, H)),
        ("attention_adjoint", "score_source", (N + 1, H)),
        ("attention_adjoint", "d_x", (N, F + 1)),
        ("attention_adjoint", "d_score_source", (N, H + 1)),
        ("attention_v2", "right", (N_COLS, F)),
        ("attention_v2", "right", (N, F + 1)),
        ("attention_v2", "out", (N, F + 1)),
        ("attention_v2", "source_gids", (N,)),
        ("attention_v2", "target_gids", (N_COLS,)),
        ("attention_v2_targets", "right", (N_COLS, F)),
        ("attention_v2_targets", "out", (N + 1, F)),
        ("attention_v2_targets", "d_out", (N, F + 1)),
        ("attention_v2_targets", "d_right", (N + 1, F)),
        ("attention_v2_targets", "d_a", (H, F)),
        ("attention_v2_targets", "record", (N, 4, H)),
        ("attention_v2_targets", "source_gids", (N,)),
        ("attention_v2_adjoint", "left", (N + 1, F)),
        ("attention_v2_adjoint", "right", (N_COLS, F + 1)),
        ("attention_v2_adjoint", "record", (N, 3, H)),
        ("attention_v2_adjoint", "record", (N_COLS, 4, H)),
        ("attention_v2_adjoint", "d_out", (N, F)),
        ("attention_v2_adjoint", "d_left", (N_COLS, F)),
        ("attention_v2_adjoint", "target_gids", (N,)),
        ("to_bfloat16", "out", (N, F + 1)),
        ("from_bfloat16", "out", (F, N)),
        ("pack_rows", "out", (N_COLS, F)),
        ("pack_rows", "out", (N, F + 1)),
        ("unpack_rows", "rows", (N + 1, F)),
        ("unpack_rows", "out", (N_COLS, F + 1)),
        ("scatter_add_rows", "rows", (N + 1, F)),
        ("scatter_add_rows", "out", (N_COLS, F - 1)),
        ("dropout", "gids", (N + 1,)),
        ("dropout", "out", (F, N)),
        ("dropout_csr", "data", (NNZ + 1,)),
        ("dropout_csr", "gids", (N + 1,)),
        ("dropout_csr", "out", (NNZ - 1,)),
        ("bias_relu_dropout", "bias", (N,)),
        ("bias_relu_dropout", "gids", (N - 1,)),
        ("bias_relu_dropout", "row_scale", (F,)),
        ("bias_relu_dropout", "out", (F, N)),
        ("relu_dropout_backward", "activated", (N, F + 1)),
        ("relu_dropout_backward", "row_scale", (F,)),
        ("relu_dropout_backward", "out", (N + 1, F)),
        ("bias_elu_dropout", "bias", (N,)),
        ("bias_elu_dropout", "gids", (N - 1,)),
        ("bias_elu_dropout", "out", (F, N)),
        ("elu_dropout_backward", "h", (N, F + 1)),
        ("elu_dropout_backward", "gids", (N + 1,)),
        ("elu_dropout_backward", "out", (N + 1, F)),
        ("softmax_cross_entropy", "labels", (N + 1,)),
        ("softmax_cross_entropy", "mask", (N - 1,)),
        ("softmax_cross_entropy", "d_logits", (N, F + 1)),
        ("softmax_cross_entropy", "class_weights", (N,)),
        ("sigmoid_cross_entropy", "labels", (N, F + 1)),
        ("sigmoid_cross_entropy", "mask", (N - 1,)),
        ("sigmoid_cross_entropy", "pos_weight", (N,)),
        ("sigmoid_cross_entropy", "d_logits", (N, F + 1)),
    ],
)
def test_shapes_that_do_not_fit(door, name, shape):
    refused(
        door,
        ValueError,
        "must have shape .* got a .* array of shape",
        **{name: np.zeros(shape, good()[door][name].dtype)},
    )


@pytest.mark.parametrize(
    ("door", "name"), [pair for pair in ARRAYS if pair not in OUTPUT.items() and pair[0] in OUTPUT]
)
def test_an_output_that_overlaps_an_input(door, name):
    args, out = good()[door], OUTPUT[door]
    # Both lie in one buffer, the input 8 bytes behind the start of the output.
    buffer = np.zeros(max(args[name].nbytes, args[out].nbytes) + 8, np.uint8)
    output = buffer[: args[out].nbytes].view(args[out].dtype).reshape(args[out].shape)
    shifted = buffer[8 : 8 + args[name].nbytes].view(args[name].dtype).reshape(args[name].shape)
    shifted[...] = args[name]
    match = (
        f"{out} overlaps {name}"
        if name in IN_PLACE.get(door, ())
        else f"{out} must not share memory with {name}"
    )
    refused(door, ValueError, match, **{name: shifted, out: output})


@pytest.mark.parametrize("door", ["gather", "gather_adjoint", "pack_rows"])
def test_these_cannot_work_in_place(door):
    args = good()[door]
    square = np.ones((N_COLS, F))
    if door == "gather":
        args |= {"indptr": np.array([0, 2, 2, 4, 4, 4], I64), "x": square, "out": square, "rows": None}
        args["row_scale"] = None
    elif door == "gather_adjoint":
        args |= {"indptr": np.array([0, 2, 2, 4, 4, 4], I64), "d_out": square, "d_x": square, "rows": None}
        args["row_scale"] = None
    else:
        args |= {"x": square, "out": square, "index": np.arange(N_COLS, dtype=I32)}
    refused(door, ValueError, "must not share memory", **args)


@pytest.mark.parametrize("door", [door for door, args in good().items() if "num_threads" in args])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError), ("2", TypeError)],
)
def test_threads(door, value, error):
    refused(door, error, "num_threads must be", num_threads=value)


@pytest.mark.parametrize(
    "door",
    ["check_csr", "gather", "gather_max", "gather_adjoint", "dropout_csr", "transpose_csr"]
    + ["attention", "attention_weights", "attention_adjoint", *ATTENTION_V2],
)
def test_a_matrix_that_is_none(door):
    for indptr in ([], [1, 2, 2, 4], [0, 2, 2, 5], [0, 2, 2, 3]):
        refused(door, ValueError, "indptr must", indptr=np.array(indptr, I64))
    refused(door, ValueError, r"indptr\[1\] = 5, indptr\[2\] = 2", indptr=np.array([0, 5, 2, 4], I64))
    refused(door, ValueError, r"indices\[2\] = -1 is outside", indices=np.array([0, 4, -1, 1], I32))


@pytest.mark.parametrize(
    "door",
    ["check_csr", "gather", "gather_max", "gather_adjoint", "transpose_csr"]
    + ["attention", "attention_weights", "attention_adjoint", *ATTENTION_V2],
)
def test_a_column_out_of_range(door):
    refused(door, ValueError, r"indices\[1\] = 5 is outside 0\.\.4", indices=np.array([0, 5, 1, 6], I32))


@pytest.mark.parametrize("door", ["pack_rows", "unpack_rows", "scatter_add_rows"])
@pytest.mark.parametrize("value", [-1, N_COLS])
def test_a_row_out_of_range(door, value):
    refused(door, ValueError, rf"index\[2\] = {value} is outside 0\.\.4", index=np.array([0, 4, value], I32))


@pytest.mark.parametrize("value", [-2, N_COLS])
def test_a_source_out_of_range(value):
    source = np.array([[0, 4, -1, 1]] * N, I32)
    source[1, 2] = value
    refused("gather_max_adjoint", ValueError, rf"source\[1, 2\] = {value} is outside -1\.\.4", source=source)


@pytest.mark.parametrize("door", ["gather", "gather_max"])
@pytest.mark.parametrize("layout", ["row", "", None, 1, ["rows"], np.array(["rows", "tiles"])])
def test_layouts_of_gather(door, layout):
    refused(door, ValueError, "layout must be auto, rows, tiles, got", layout=layout)


@pytest.mark.parametrize("door", ["gather", "gather_adjoint"])
def test_options_of_gather(door):
    for rows in ((0, N + 1), (-1, 2), (2, 1)):
        refused(door, ValueError, "rows", rows=rows)
    for rows in (3, "ab", (0, 1, 2), (0.0, 1.0), slice(0, 2)):
        refused(door, TypeError, "rows", rows=rows)
    for weight in (np.nan, np.inf, 10**400):
        refused(door, ValueError, "self_weight must be finite in float64", self_weight=weight)
    for weight in (None, "1", True, 1j, np.ones(1)):
        refused(door, TypeError, "self_weight must be a number", self_weight=weight)
    output = "out" if door == "gather" else "d_x"
    refused(door, ValueError, f"accumulate=True adds to {output}", accumulate=True, **{output: None})


FLAGS = [(door, name) for door in ("gather", "gather_adjoint") for name in ("mean", "accumulate")]
FLAGS += [("gather_max_adjoint", "accumulate"), ("bias_relu_dropout", "relu")]


@pytest.mark.parametrize(("door", "name"), FLAGS)
def test_flags(door, name):
    """A text is true whatever it says."""
    for value in ("no", None, 1, np.array([True, False])):
        refused(door, TypeError, f"{name} must be True or False, got", **{name: value})
    getattr(ck, door)(**good()[door] | {name: np.True_})


def in_float32(args):
    """The same arguments in the smaller dtype."""
    narrow = {
        name: value.astype(F32) if isinstance(value, np.ndarray) and value.dtype == F64 else value
        for name, value in args.items()
    }
    if "saved" in narrow:
        narrow["saved"] = type(narrow["saved"])(*(array.astype(F32) for array in narrow["saved"]))
    return narrow


@pytest.mark.parametrize(
    ("door", "name"),
    [("gather", "self_weight"), ("gather_adjoint", "self_weight")]
    + [(door, "slope") for door, args in good().items() if "slope" in args],
)
def test_numbers_that_are_infinite_in_the_dtype(door, name):
    """1e39 is finite, but not in the float32 that a loop has it in: it would make NaN of 0."""
    args = in_float32(good()[door])
    getattr(ck, door)(**args | {name: 3e38})
    with pytest.raises(ValueError, match=rf"{name} must be finite in float32, got 1e\+39"):
        getattr(ck, door)(**args | {name: 1e39})
    getattr(ck, door)(**good()[door] | {name: 1e39})
    refused(door, ValueError, f"{name} must be finite in float64, got inf", **{name: 10**400})


ATTENTION = ["attention", "attention_weights", "attention_targets", "attention_adjoint"]


@pytest.mark.parametrize("door", ATTENTION_V2)
def test_options_of_attention_v2(door):
    for rows in ((0, N + 1), (-1, 2), (2, 1)):
        refused(door, ValueError, "rows", rows=rows)
    for slope in (-0.1, np.nan, np.inf):
        refused(door, ValueError, "slope must", slope=slope)
    for heads, width in ((0, 4), (4, 0), (3, 1), (1, F + 1), (H, H + 1)):
        refused(
            door, ValueError, rf"a has {heads} head\(s\) of {width} column\(s\) for 4 columns of left",
            a=np.ones((heads, width)),
        )  # fmt: skip
    for name in ("source_gids", "target_gids"):
        refused(door, TypeError, f"{name} must be a NumPy array, got a NoneType", **{name: None})
        getattr(ck, door)(**good()[door] | {name: None, "p": 0.0})


@pytest.mark.parametrize("door", ["attention_v2", "attention_v2_targets"])
def test_what_attention_v2_saves_is_checked(door):
    saved = good()[door]["saved"]
    refused(door, TypeError, "saved must be an AttentionV2Saved, got a tuple", saved=tuple(saved))
    for name, array in saved._asdict().items():
        for wrong, error, match in (
            (array.astype(F32), TypeError, "must be float64"),
            (array[1:], ValueError, "must have shape"),
            (np.concatenate([array, array], axis=1)[:, :H], ValueError, "must be C-contiguous and aligned"),
        ):
            refused(door, error, rf"saved\.{name} {match}", saved=saved._replace(**{name: wrong}))
        memory = np.zeros((N, F))
        inside = saved._replace(**{name: memory.ravel()[: N * H].reshape(N, H)})
        refused(door, ValueError, "must not share memory with", saved=inside, **{OUTPUT[door]: memory})
    if door == "attention_v2":
        twice = saved._replace(row_sum=saved.row_max)
        refused(door, ValueError, "saved.row_sum must not share memory with saved.row_max", saved=twice)
        saved.row_max.flags.writeable = False
        refused(door, ValueError, "saved.row_max must be writable", saved=saved)


def test_results_of_attention_v2_are_apart():
    for door, one, other in (
        ("attention_v2_targets", "d_right", "record"),
        ("attention_v2_targets", "d_right", "d_a"),
        ("attention_v2_targets", "d_a", "record"),
        ("attention_v2_targets", "record", "d_out"),
        ("attention_v2_targets", "d_a", "left"),
    ):
        args = good()[door]
        memory = np.ones(max(args[one].size, args[other].size))
        changes = {name: memory[: args[name].size].reshape(args[name].shape) for name in (one, other)}
        with pytest.raises(ValueError, match=f"{one} must not share memory with {other}"):
            getattr(ck, door)(**args | changes)
        assert (memory == 1).all()


@pytest.mark.parametrize("door", ATTENTION)
def test_options_of_attention(door):
    for rows in ((0, N + 1), (-1, 2), (2, 1)):
        refused(door, ValueError, "rows", rows=rows)
    refused(door, TypeError, "rows", rows=3)
    for slope in (-0.1, np.nan, np.inf):
        refused(door, ValueError, "slope must", slope=slope)
    refused(door, TypeError, "slope must be a number", slope=None)
    scores = "score_target" if door == "attention_targets" else "score_source"
    for heads in (0, 3) if door != "attention_weights" else (0,):
        wide = np.ones((len(good()[door][scores]), heads))
        refused(door, ValueError, rf"{scores} has {heads} head", **{scores: wide})


@pytest.mark.parametrize("door", ["attention", "attention_weights", "attention_adjoint"])
def test_attention_needs_ids_to_drop(door):
    for name in ("source_gids", "target_gids"):
        refused(door, TypeError, f"{name} must be a NumPy array, got a NoneType", **{name: None})
        getattr(ck, door)(**good()[door] | {name: None, "p": 0.0})


@pytest.mark.parametrize("door", ["attention", "attention_targets"])
def test_what_attention_saves_is_checked(door):
    saved = good()[door]["saved"]
    refused(door, TypeError, "saved must be an AttentionSaved, got a tuple", saved=tuple(saved))
    for name, array in saved._asdict().items():
        refused(
            door,
            TypeError,
            rf"saved\.{name} must be float64",
            saved=saved._replace(**{name: array.astype(F32)}),
        )
        refused(
            door, ValueError, rf"saved\.{name} must have shape", saved=saved._replace(**{name: array[1:]})
        )
    output = good()[door][OUTPUT[door]]
    same = saved._replace(**{"negative" if door == "attention" else "row_max": output})
    refused(door, ValueError, "must not share memory with", saved=same, **{OUTPUT[door]: output})
    if door == "attention":
        twice = saved._replace(row_sum=saved.row_max)
        refused(door, ValueError, "saved.row_sum must not share memory with saved.row_max", saved=twice)
        saved.negative.flags.writeable = False
        refused(door, ValueError, "saved.negative must be writable", saved=saved)


def test_what_is_no_transpose_of_the_matrix():
    args = good()["gather_adjoint"]
    right = ck.transpose_csr(args["indptr"], args["indices"], n_cols=N_COLS)
    ck.gather_adjoint(**args, transposed=right)
    args["d_x"][:] = 0  # what the calls below must leave alone
    door = "gather_adjoint"
    refused(door, TypeError, "transposed must be a Transposed, got a tuple", transposed=tuple(right))
    for name, array in right._asdict().items():
        wrong = right._replace(**{name: array.astype(np.int16)})
        refused(door, TypeError, rf"transposed\.{name} must be int", transposed=wrong)
        wrong = right._replace(**{name: np.append(array, array[-1:])})
        refused(door, ValueError, rf"transposed\.{name} must have shape", transposed=wrong)
        buffer = np.zeros(N_COLS * F * 8, np.uint8)
        buffer[: array.nbytes] = array.view(np.uint8)
        inside = right._replace(**{name: buffer[: array.nbytes].view(array.dtype)})
        out = buffer.view(F64).reshape(N_COLS, F)
        match = rf"d_x must not share memory with transposed\.{name}"
        refused(door, ValueError, match, d_x=out, transposed=inside)
    ends = right._replace(indptr=right.indptr + 1)
    refused(door, ValueError, r"transposed\.indptr must run from 0 to .*\(4\), got 1 to 5", transposed=ends)
    falls = right._replace(indptr=np.array([0, 9, 3, 3, 3, 4], I64))
    refused(door, ValueError, r"transposed\.indptr\[1\] = 9", transposed=falls)


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_a_transpose_is_checked_entry_by_entry(threads):
    """indices are 0 4 | | 1 1: transposed, columns 0, 1 (twice) and 4 have entries."""
    args = good()["gather_adjoint"]
    right = ck.transpose_csr(args["indptr"], args["indices"], n_cols=N_COLS)
    assert [list(array) for array in right] == [[0, 1, 3, 3, 3, 4], [0, 2, 2, 0], [0, 2, 3, 1]]
    for first, change in [
        (0, {"indices": [-1, 2, 2, 0]}),  # no row
        (3, {"indices": [0, 2, 2, N]}),
        (1, {"indices": [0, 1, 2, 0]}),  # not the row of the entry
        (0, {"entries": [-1, 2, 3, 1]}),  # no entry
        (3, {"entries": [0, 2, 3, NNZ]}),
        (2, {"entries": [0, 2, 2, 1]}),  # twice
        (2, {"entries": [0, 3, 2, 1]}),  # in another order
        (0, {"entries": [1, 2, 3, 0]}),  # of another column
        (1, {"indptr": [0, 2, 3, 3, 3, 4]}),
    ]:
        changed = {name: np.array(value, getattr(right, name).dtype) for name, value in change.items()}
        refused(
            "gather_adjoint",
            ValueError,
            rf"not the transpose of this matrix, .* its entry {first} comes",
            transposed=right._replace(**changed),
            num_threads=threads,
        )


def test_a_self_term_needs_own_rows():
    narrow = {"indices": np.zeros(NNZ, I32), "source_scale": None}
    refused("gather", ValueError, "self_weight needs .* got 2 for 3", x=np.ones((2, F)), **narrow)
    refused("gather_adjoint", ValueError, "self_weight needs", n_sources=2, d_x=None, **narrow)
    args = good()["gather"] | narrow | {"x": np.ones((2, F)), "self_weight": 0.0}
    np.testing.assert_array_equal(ck.gather(**args)[:, 0], [3, 0, 7])


@pytest.mark.parametrize(
    ("door", "name"), [("check_csr", "n_cols"), ("transpose_csr", "n_cols"), ("gather_adjoint", "n_sources")]
)
def test_numbers_of_columns(door, name):
    for value in (-1, 2**31 + 1):
        refused(door, ValueError, f"{name} must be at least 0", **{name: value})
    for value in (1.5, True, None):
        refused(door, TypeError, f"{name} must be an integer", **{name: value})


DROPPING = [door for door, args in good().items() if "p" in args]


@pytest.mark.parametrize("door", DROPPING)
def test_probabilities(door):
    for p in (-0.1, 1.0, 1, 2.0, np.nan, np.inf):
        refused(door, ValueError, "p must be", p=p)
    for p in (None, "0.5", True):
        refused(door, TypeError, "p must be a number", p=p)


@pytest.mark.parametrize("door", [door for door in DROPPING if door != "relu_dropout_backward"])
@pytest.mark.parametrize(("name", "bound"), [("seed", 2**64), ("epoch", 2**32), ("layer", 2**32)])
def test_keys(door, name, bound):
    for value in (-1, bound):
        refused(
            door, ValueError, f"{name} must be at least 0 and below {bound}, got {value}", **{name: value}
        )
    for value in (1.0, None, True):
        refused(door, TypeError, f"{name} must be an integer", **{name: value})
    getattr(ck, door)(**good()[door] | {name: np.int64(3)})


TILED = [
    ("bias_relu_dropout", "out"),
    ("dropout", "out"),
    ("relu_dropout_backward", "activated"),
    ("relu_dropout_backward", "out"),
    ("pack_rows", "x"),
    ("unpack_rows", "out"),
]


@pytest.mark.parametrize(("door", "name"), TILED)
def test_tiles_that_do_not_fit(door, name):
    args = good()[door]
    wide = ck.to_tiles(np.zeros((args[name].shape[0], F + 1)))
    refused(door, ValueError, "must have shape", **{name: wide})
    if (door, name) != ("pack_rows", "x"):
        single = ck.to_tiles(args[name].astype(F32))
        refused(door, TypeError, f"{name} must be float64, got float32 tiles", **{name: single})
    if name == "out":
        frozen = ck.to_tiles(args[name])
        frozen.array.flags.writeable = False
        refused(door, ValueError, "out must be writable, got read-only tiles", out=frozen)


@pytest.mark.parametrize(("door", "name"), TILED)
def test_tiles_whose_array_got_another_shape(door, name):
    """A loop would read and write beyond its end."""
    value = good()[door][name]
    tiles = empty_tiles(value.shape[0], 2 * F, value.dtype, F)
    object.__setattr__(tiles, "array", tiles.array.reshape(1, 2 * value.shape[0], F))
    refused(door, ValueError, "8 columns do not make 1 tiles of 4", **{name: tiles})


def test_tiles_that_overlap_an_input():
    memory = np.ones(N * 16)
    rows, tiles = memory[: N * 8].reshape(N, 8), ck.Tiles(memory.reshape(1, N, 16), 8)
    refused("bias_relu_dropout", ValueError, "out overlaps z", z=rows, bias=None, out=tiles)
    refused("dropout", ValueError, "out overlaps x", x=rows, out=tiles)
    apart = {"activated": np.ones((N, 8)), "out": tiles}
    refused("relu_dropout_backward", ValueError, "out overlaps d_out", d_out=rows, **apart)
    apart = {"d_out": np.ones((N, 8)), "out": tiles}
    refused("relu_dropout_backward", ValueError, "out overlaps activated", activated=rows, **apart)
    index = np.zeros(N, I32)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        ck.pack_rows(tiles, index, rows)
    with pytest.raises(ValueError, match="out must not share memory with rows"):
        ck.unpack_rows(rows, index, tiles)


@pytest.mark.parametrize(("door", "name"), [("pack_rows", "x"), ("unpack_rows", "rows")])
def test_bfloat16_has_no_float64(door, name):
    refused(
        door, TypeError, "out must be float64, got a uint16", out=np.zeros(good()[door]["out"].shape, U16)
    )
    bits = good()[door][name].astype(U16)
    refused(door, TypeError, "out must be float32 or uint16, got a float64", **{name: bits})


@pytest.mark.parametrize("door", ["bias_relu_dropout", "dropout", "relu_dropout_backward"])
def test_float64_is_not_rounded_to_bfloat16(door):
    refused(door, TypeError, "out must be float64, got a uint16", out=np.zeros((N, F), U16))


def test_dropping_needs_ids():
    for door in ("bias_relu_dropout", "bias_elu_dropout", "elu_dropout_backward"):
        refused(door, TypeError, "gids must be a NumPy array", gids=None)
        getattr(ck, door)(**good()[door] | {"gids": None, "p": 0.0})
    refused("dropout", TypeError, "gids must be a NumPy array", gids=None, p=0.0)
    refused("dropout_csr", TypeError, "data must be a NumPy array", data=None)


def test_labels():
    for label in (-1, F):
        labels = np.array([0, 99, label], I32)
        refused(
            "softmax_cross_entropy", ValueError, rf"labels\[2\] = {label} is outside 0\.\.3", labels=labels
        )
    for scale in (np.nan, np.inf):
        refused("softmax_cross_entropy", ValueError, "scale must be finite", scale=scale)
    refused("softmax_cross_entropy", TypeError, "scale must be a number", scale=None)


def test_words_of_the_generator():
    with pytest.raises(ValueError, match="4 words and a key 2, got 3 and 2"):
        ck.philox4x32((0, 0, 0), (0, 0))
    with pytest.raises(ValueError, match="below 4294967296"):
        ck.philox4x32((0, 0, 0, 2**32), (0, 0))
    with pytest.raises(TypeError, match="a word must be an integer"):
        ck.philox4x32((0, 0, 0, 0), (0, 0.5))


def test_marks():
    labels = good()["sigmoid_cross_entropy"]["labels"]
    labels[2, 3] = 2
    refused(
        "sigmoid_cross_entropy", ValueError, r"labels\[2, 3\] = 2 is neither 0, 1 nor 255 and", labels=labels
    )
    for scale in (np.nan, np.inf):
        refused("sigmoid_cross_entropy", ValueError, "scale must be finite", scale=scale)
