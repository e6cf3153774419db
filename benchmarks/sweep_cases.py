"""What ``sweep_keras.py`` calls: arguments and points of every function, loss and layer, or why it is left out."""

# ruff: noqa: E501  one line per function, like a table
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import losses as kloss

MODULES = {
    "keras.activations": keras.activations,
    "keras.ops": keras.ops,
    "tf.math": tf.math,
    "tf.nn": tf.nn,
    "tf.linalg": tf.linalg,
}
Points = list[tuple[str, list[np.ndarray]]]


def names_of(module: str) -> list[str]:
    """Public functions of a module."""
    found = MODULES[module]
    return [n for n in sorted(dir(found)) if not n.startswith("_") and inspect.isroutine(getattr(found, n))]


def losses() -> list[str]:
    return [n for n in dir(kloss) if inspect.isclass(getattr(kloss, n))]


def layers() -> list[str]:
    return [n for n in dir(kl) if inspect.isclass(getattr(kl, n))]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def points(**arrays: Any) -> Points:
    return [
        (name.replace("_", " "), [np.array(a, dtype=np.asarray(a).dtype if np.asarray(a).dtype.kind != "i" else float)
                                  for a in (value if isinstance(value, tuple) else (value,))])
        for name, value in arrays.items()
    ]  # fmt: skip


UNARY = points(
    generic=[-1.7, -0.6, 0.3, 0.9], positive=[0.2, 0.7, 1.5, 3.1], inside_one=[-0.8, -0.3, 0.2, 0.7],
    beyond_one=[1.2, 2.5, 3.5, 4.2], zeros=[0.0, 0.0, 0.0], one_zero=[0.0, 1.3, -0.7], zero_and_positive=[0.0, 0.7, 1.3],
    two_zeros=[0.0, 0.0, 1.3, 0.7], ones=[1.0, -1.0, 1.0], positive_ones=[1.0, 1.0, 1.0], ties=[2.0, 2.0, 2.0],
    halves=[0.5, -0.5, 1.5], saturated=[-40.0, 40.0, 20.0], extreme=[-800.0, 800.0, 100.0], threes=[3.0, -3.0, 6.0],
    large_positive=[1e2, 1e3, 1e4], tiny=[1e-20, -1e-20, 1e-9],
)  # fmt: skip
BINARY = points(
    generic=([-1.7, 0.6, 0.3], [0.8, -1.1, 2.4]), positive=([0.2, 1.5, 3.1], [1.4, 0.6, 2.3]),
    inside_one=([0.2, 0.5, 0.7], [0.3, 0.6, 0.1]), equal=([1.5, 0.7, 2.0], [1.5, 0.7, 2.0]),
    first_zero=([0.0, 0.0, 0.0], [0.8, 1.1, 2.4]), second_zero=([0.8, 1.1, 2.4], [0.0, 0.0, 0.0]),
    both_zero=([0.0, 0.0], [0.0, 0.0]), negative_base=([-2.0, -3.0], [2.0, 3.0]),
    far_apart=([1e3, -1e3], [-1e3, 1e3]), broadcast=(normal(3, 1), normal(1, 2)), with_scalar=(normal(3), np.array(0.7)),
)  # fmt: skip
MATRIX = points(
    generic=normal(3, 3), identity=np.eye(3), equal_entries=np.ones((2, 2)), singular=np.outer([1.0, 2.0], [3.0, 1.0]),
    zero=np.zeros((2, 2)), symmetric=[[2.0, 0.5], [0.5, 1.0]], equal_eigenvalues=2 * np.eye(2),
)  # fmt: skip
POSITIVE_DEFINITE = points(
    generic=normal(3, 3) @ normal(3, 3).T + np.eye(3), identity=np.eye(2), diagonal=np.diag([1.0, 2.0, 3.0])
)
TABLE = points(
    generic=normal(3, 4), ties=np.ones((2, 3)), zeros=np.zeros((2, 3)), one_zero=[[0.0, 1.0, 2.0], [1.0, 3.0, 2.0]],
    two_zeros=[[0.0, 0.0, 2.0], [1.0, 3.0, 2.0]],
)  # fmt: skip
COMPLEX = points(
    generic=([1.0, -0.5, 0.3], [2.0, 1.0, -0.7]), zero=([0.0, 1.0], [0.0, 0.0]), real=([1.0, -2.0], [0.0, 0.0])
)
SOLVE = points(generic=(normal(3, 3) + 2 * np.eye(3), normal(3, 2)), identity=(np.eye(2), normal(2, 1)))
IMAGE = points(generic=normal(1, 4, 4, 2), ties=np.ones((1, 4, 4, 1)), zeros=np.zeros((1, 4, 4, 1)))
SEGMENTS = np.array([0, 0, 1, 1])
LABELS = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
LOGITS = points(
    generic=normal(2, 3), zeros=np.zeros((2, 3)), saturated=[[40.0, -40.0, 0.0], [800.0, 0.0, -800.0]],
    hit=[[-90.0, 90.0, -90.0], [90.0, -90.0, -90.0]],
)  # fmt: skip
PROBABILITIES = points(
    generic=[[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], exact=LABELS, reversed=LABELS[::-1], equal=np.full((2, 3), 1 / 3)
)


def c(value: Any) -> Any:
    return tf.constant(value)


def one(call: Callable[[Any], Callable[..., Any]], at: Points, label: str = "") -> list[Any]:
    return [(label, call, at)]


#: name: (how to call it, points), for functions that cannot be called with one or two plain vectors.
RECIPES: dict[str, Any] = {
    "einsum": (lambda f: lambda a, b: f("ij,jk->ik", a, b), points(generic=(normal(2, 3), normal(3, 2)))),
    "matmul": (lambda f: f, points(generic=(normal(2, 3), normal(3, 2)), zeros=(np.zeros((2, 2)), np.zeros((2, 2))))),
    "dot": (lambda f: f, points(generic=(normal(2, 3), normal(3, 2)), vectors=(normal(3), normal(3, seed=1)))),
    "vdot": (lambda f: f, points(vectors=(normal(3), normal(3, seed=1)))),
    "inner": (lambda f: f, points(vectors=(normal(3), normal(3, seed=1)))),
    "outer": (lambda f: f, points(vectors=(normal(3), normal(2)))),
    "kron": (lambda f: f, points(generic=(normal(2, 2), normal(2, 1)))),
    "cross": (lambda f: f, points(generic=(normal(3), normal(3, seed=1)), parallel=([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]))),
    "tensordot": (lambda f: lambda a, b: f(a, b, 1), points(generic=(normal(2, 3), normal(3, 2)))),
    "matvec": (lambda f: f, points(generic=(normal(2, 3), normal(3)))),
    "cdist": (lambda f: f, points(generic=(normal(2, 3), normal(3, 3)), equal=(np.ones((2, 2)), np.ones((2, 2))))),
    "cholesky": (lambda f: lambda a: f((a + tf.transpose(a)) / 2), POSITIVE_DEFINITE),
    "cholesky_inverse": (lambda f: lambda a: f(tf.linalg.band_part(a, -1, 0)), POSITIVE_DEFINITE),
    "cholesky_solve": (lambda f: lambda a, b: f(tf.linalg.band_part(a, -1, 0), b), SOLVE),
    "eigh": (lambda f: lambda a: f((a + tf.transpose(a)) / 2)[0], MATRIX),
    "eigvalsh": (lambda f: lambda a: f((a + tf.transpose(a)) / 2), MATRIX),
    "eig": (lambda f: lambda a: tf.math.real(f(a)[0]), points(generic=np.diag([1.0, 2, 3]) + 0.1 * normal(3, 3))),
    "eigvals": (lambda f: lambda a: tf.math.real(f(a)), points(generic=np.diag([1.0, 2, 3]) + 0.1 * normal(3, 3))),
    "eigh_tridiagonal": (lambda f: lambda a, b: f(a, b), points(generic=([1.0, 2, 4], [0.5, 0.3]))),
    "svd": (lambda f: lambda a: (f(a)[0] if f is tf.linalg.svd else f(a)[1]),
            [*MATRIX, *points(wide=normal(2, 3), tall=normal(3, 2))]),
    "qr": (lambda f: f, points(generic=normal(3, 3), tall=normal(3, 2), wide=normal(2, 3), singular=np.ones((2, 2)))),
    "lu": (lambda f: lambda a: f(a)[0], points(generic=normal(3, 3))),
    "lu_factor": (lambda f: lambda a: f(a)[0], points(generic=normal(3, 3))),
    "lu_solve": (lambda f: lambda a, b: f(a, tf.range(3), b), points(generic=(normal(3, 3) + 2 * np.eye(3), normal(3, 1)))),
    "lu_matrix_inverse": (lambda f: lambda a: f(a, tf.range(3)), points(generic=normal(3, 3) + 2 * np.eye(3))),
    "lu_reconstruct": (lambda f: lambda a: f(a, tf.range(3)), points(generic=normal(3, 3))),
    "expm": (lambda f: f, MATRIX), "sqrtm": (lambda f: lambda a: f(a @ tf.transpose(a) + tf.eye(2, dtype=a.dtype)),
                                             points(generic=normal(2, 2))),
    "logm": (lambda f: lambda a: tf.math.real(f(tf.cast(a, tf.complex128))), POSITIVE_DEFINITE),
    "inv": (lambda f: f, MATRIX), "pinv": (lambda f: f, [*MATRIX, *points(tall=normal(3, 2), wide=normal(2, 3))]),
    "det": (lambda f: f, MATRIX), "logdet": (lambda f: lambda a: f((a + tf.transpose(a)) / 2), POSITIVE_DEFINITE),
    "slogdet": (lambda f: lambda a: f(a)[1], MATRIX), "trace": (lambda f: f, MATRIX), "diag": (lambda f: f, UNARY[:3]),
    "diagonal": (lambda f: f, MATRIX), "diag_part": (lambda f: f, MATRIX), "tensor_diag_part": (lambda f: f, MATRIX),
    "set_diag": (lambda f: f, points(generic=(normal(2, 2), normal(2)))),
    "band_part": (lambda f: lambda a: f(a, 1, 0), MATRIX),
    "tril": (lambda f: f, MATRIX), "triu": (lambda f: f, MATRIX),
    "solve": (lambda f: f, SOLVE), "lstsq": (lambda f: f, [*SOLVE, *points(tall=(normal(3, 2), normal(3, 1)))]),
    "solve_triangular": (lambda f: lambda a, b: f(a, b, lower=True), SOLVE),
    "triangular_solve": (lambda f: f, SOLVE),
    "banded_triangular_solve": (lambda f: f, points(generic=(normal(2, 3) + 2, normal(3, 1)))),
    "tridiagonal_solve": (lambda f: f, points(generic=(normal(3, 3) + np.array([[0], [4], [0]]), normal(3)))),
    "tridiagonal_matmul": (lambda f: lambda d, b: f(d, b), points(generic=(normal(3, 3), normal(3, 2)))),
    "norm": (lambda f: f, [*UNARY, *MATRIX]), "global_norm": (lambda f: lambda a: f([a]), UNARY),
    "normalize": (lambda f: f, [*UNARY, *MATRIX]), "adjoint": (lambda f: f, MATRIX),
    "matrix_transpose": (lambda f: f, MATRIX), "transpose": (lambda f: f, MATRIX),
    "var": (lambda f: f, [*UNARY, *TABLE]), "std": (lambda f: f, [*UNARY, *TABLE]),
    "reduce_std": (lambda f: f, [*UNARY, *TABLE]), "reduce_prod": (lambda f: lambda x: f(x, -1), [*UNARY, *TABLE]),
    "prod": (lambda f: lambda x: f(x, -1), [*UNARY, *TABLE]),
    "cumprod": (lambda f: lambda x: f(x, -1), [*UNARY, *TABLE]),
    "nancumprod": (lambda f: lambda x: f(x, -1), [*UNARY, *TABLE]),
    "max": (lambda f: lambda x: f(x, -1), TABLE), "min": (lambda f: lambda x: f(x, -1), TABLE),
    "median": (lambda f: lambda x: f(x, -1), TABLE),
    "quantile": (lambda f: lambda x: f(x, 0.3), [*UNARY, *TABLE]),
    "percentile": (lambda f: lambda x: f(x, 30.0), [*UNARY, *TABLE]),
    "nanquantile": (lambda f: lambda x: f(x, 0.3), UNARY), "nanpercentile": (lambda f: lambda x: f(x, 30.0), UNARY),
    "corrcoef": (lambda f: f, TABLE), "correlate": (lambda f: f, points(generic=(normal(4), normal(3)))),
    "average": (lambda f: lambda x, w: f(x, weights=w), BINARY[:4]),
    "clip": (lambda f: lambda x: f(x, -1.0, 2.0), UNARY), "cast": (lambda f: lambda x: f(x, "float64"), UNARY[:1]),
    "saturate_cast": (lambda f: lambda x: f(x, "float64"), UNARY[:1]),
    "threshold": (lambda f: lambda x: f(x, 0.5, 0.1), UNARY), "glu": (lambda f: f, TABLE[:0] + points(generic=normal(2, 4))),
    "crelu": (lambda f: f, UNARY), "top_k": (lambda f: lambda x: f(x, 2)[0], UNARY),
    "approx_max_k": (lambda f: lambda x: f(x, 2)[0], UNARY[:2]), "approx_min_k": (lambda f: lambda x: f(x, 2)[0], UNARY[:2]),
    "where": (lambda f: lambda a, b: f(c([True, False, True]), a, b), BINARY[:4]),
    "select": (lambda f: lambda a, b: f([c([True, False, True])], [a], b), BINARY[:4]),
    "cond": (lambda f: lambda x: f(c(True), lambda: x * x, lambda: x), UNARY[:2]),
    "switch": (lambda f: lambda x: f(c(1), [lambda v: v, lambda v: v * v], x), UNARY[:2]),
    "while_loop": (lambda f: lambda x: f(lambda i, v: i < 3, lambda i, v: (i + 1, v * x), (c(0), x))[1], UNARY[:2]),
    "fori_loop": (lambda f: lambda x: f(0, 3, lambda i, v: v * x, x), UNARY[:2]),
    "scan": (lambda f: lambda x: f(lambda s, v: (s * v, s + v), x[0], x), UNARY[:2]),
    "associative_scan": (lambda f: lambda x: f(lambda a, b: a * b, x), UNARY),
    "map": (lambda f: lambda x: f(lambda v: v * v, x), UNARY[:2]),
    "vectorized_map": (lambda f: lambda x: f(lambda v: v * v, x), UNARY[:2]),
    "vectorize": (lambda f: lambda x: f(lambda v: v * v)(x), UNARY[:2]),
    "jvp": (lambda f: lambda x: f(lambda v: v**3, (x,), (x,)), UNARY[:2]),
    "append": (lambda f: f, BINARY[:1]), "broadcast_to": (lambda f: lambda x: f(x, (2, 4)), UNARY[:2]),
    "reshape": (lambda f: lambda x: f(x, (2, 2)), UNARY[:2]), "view": (lambda f: lambda x: f(x, "float64"), UNARY[:2]),
    "expand_dims": (lambda f: lambda x: f(x, 0), UNARY[:2]), "squeeze": (lambda f: lambda x: f(x[None]), UNARY[:2]),
    "moveaxis": (lambda f: lambda x: f(x, 0, 1), MATRIX[:1]), "swapaxes": (lambda f: lambda x: f(x, 0, 1), MATRIX[:1]),
    "roll": (lambda f: lambda x: f(x, 1), UNARY[:2]), "rot90": (lambda f: f, MATRIX[:1]),
    "repeat": (lambda f: lambda x: f(x, 2), UNARY[:2]), "tile": (lambda f: lambda x: f(x, [2]), UNARY[:2]),
    "pad": (lambda f: lambda x: f(x, [[1, 1]], mode="reflect"), UNARY[:2]), "fliplr": (lambda f: f, MATRIX[:1]),
    "flipud": (lambda f: f, MATRIX[:1]), "rearrange": (lambda f: lambda x: f(x, "a b -> b a"), MATRIX[:1]),
    "concatenate": (lambda f: lambda a, b: f([a, b]), BINARY[:1]), "stack": (lambda f: lambda a, b: f([a, b]), BINARY[:1]),
    "hstack": (lambda f: lambda a, b: f([a, b]), BINARY[:1]), "vstack": (lambda f: lambda a, b: f([a, b]), BINARY[:1]),
    "dstack": (lambda f: lambda a, b: f([a, b]), BINARY[:1]), "split": (lambda f: lambda x: f(x, 2), UNARY[:2]),
    "array_split": (lambda f: lambda x: f(x, 3), UNARY[:2]), "hsplit": (lambda f: lambda x: f(x, 2), UNARY[:2]),
    "vsplit": (lambda f: lambda x: f(x, 2), points(generic=normal(2, 2))),
    "dsplit": (lambda f: lambda x: f(x, 2), points(generic=normal(1, 1, 2))), "unstack": (lambda f: f, UNARY[:2]),
    "meshgrid": (lambda f: f, BINARY[:1]), "diff": (lambda f: f, UNARY), "ravel": (lambda f: f, UNARY[:1]),
    "take": (lambda f: lambda x: f(x, [0, 0, 2]), UNARY), "get_item": (lambda f: lambda x: f(x, 1), UNARY[:2]),
    "take_along_axis": (lambda f: lambda x: f(x, c([0, 0, 2]), 0), UNARY),
    "slice": (lambda f: lambda x: f(x, (1,), (2,)), UNARY[:2]),
    "slice_update": (lambda f: lambda x, u: f(x, (1,), u), points(generic=(normal(4), normal(2)))),
    "scatter": (lambda f: lambda u: f(c([[0], [0], [2]]), u, (4,)), points(repeated=normal(3))),
    "scatter_update": (lambda f: lambda x, u: f(x, c([[0], [2]]), u), points(generic=(normal(4), normal(2)))),
    "nan_to_num": (lambda f: f, UNARY), "trapezoid": (lambda f: f, UNARY[:3]), "vander": (lambda f: f, UNARY),
    "polar": (lambda f: f, points(generic=([1.0, 0.5], [0.3, 2.0]), zero=([0.0, 1.0], [0.0, 0.0]))),
    "view_as_complex": (lambda f: f, points(generic=normal(3, 2))), "view_as_real": (lambda f: lambda a, b: f(tf.complex(a, b)), COMPLEX),
    "real": (lambda f: lambda a, b: f(tf.complex(a, b)), COMPLEX), "imag": (lambda f: lambda a, b: f(tf.complex(a, b)), COMPLEX), "conj": (lambda f: lambda a, b: f(tf.complex(a, b)), COMPLEX),
    "conjugate": (lambda f: lambda a, b: f(tf.complex(a, b)), COMPLEX), "angle": (lambda f: lambda a, b: f(tf.complex(a, b)), COMPLEX),
    "fft": (lambda f: lambda a, b: f((a, b)), points(generic=(normal(4), normal(4, seed=1)))),
    "fft2": (lambda f: lambda a, b: f((a, b)), points(generic=(normal(2, 2), normal(2, 2, seed=1)))),
    "ifft2": (lambda f: lambda a, b: f((a, b)), points(generic=(normal(2, 2), normal(2, 2, seed=1)))),
    "rfft": (lambda f: f, points(generic=normal(6))),
    "irfft": (lambda f: lambda a, b: f((a, b)), points(generic=(normal(4), normal(4, seed=1)))),
    "stft": (lambda f: lambda x: f(x, 4, 2, 4), points(generic=normal(10))),
    "istft": (lambda f: lambda a, b: f((a, b), 4, 2, 4), points(generic=(normal(4, 3), normal(4, 3, seed=1)))),
    "extract_sequences": (lambda f: lambda x: f(x, 3, 1), points(generic=normal(6))),
    "segment_sum": (lambda f: lambda x: f(x, c(SEGMENTS)), points(generic=normal(4), ties=np.ones(4))),
    "segment_max": (lambda f: lambda x: f(x, c(SEGMENTS)), points(generic=normal(4), ties=np.ones(4))),
    "segment_min": (lambda f: lambda x: f(x, c(SEGMENTS)), points(generic=normal(4), ties=np.ones(4))),
    "segment_mean": (lambda f: lambda x: f(x, c(SEGMENTS)), points(generic=normal(4), ties=np.ones(4))),
    "segment_prod": (lambda f: lambda x: f(x, c(SEGMENTS)),
                     points(generic=normal(4), one_zero=[0.0, 2.0, 3.0, 1.0], two_zeros=[0.0, 0.0, 3.0, 1.0])),
    **{f"unsorted_segment_{kind}": (lambda f: lambda x: f(x, c(SEGMENTS), 3),
                                    points(generic=normal(4), ties=np.ones(4), one_zero=[0.0, 2.0, 3.0, 1.0],
                                           two_zeros=[0.0, 0.0, 3.0, 1.0]))
       for kind in ("max", "mean", "min", "prod", "sqrt_n", "sum")},
    "power": (lambda f: f, [*BINARY, *points(zero_to_one=([0.0], [1.0]), zero_to_two=([0.0], [2.0]))]),
    "pow": (lambda f: f, [*BINARY, *points(zero_to_one=([0.0], [1.0]), zero_to_two=([0.0], [2.0]))]),
    "polygamma": (lambda f: f, points(generic=([1.0, 2.0], [0.7, 2.5]))),
    "zeta": (lambda f: f, points(generic=([2.0, 3.5], [0.7, 2.5]))),
    "betainc": (lambda f: f, points(generic=([1.5, 2.0], [0.7, 2.5], [0.3, 0.6]))),
    "igamma": (lambda f: f, points(generic=([1.5, 2.0], [0.7, 2.5]), at_zero=([1.5, 2.0], [0.0, 0.0]),
                                   large=([50.0, 200.0], [60.0, 180.0]))),
    "igammac": (lambda f: f, points(generic=([1.5, 2.0], [0.7, 2.5]), at_zero=([1.5, 2.0], [0.0, 0.0]))),
    "lbeta": (lambda f: f, points(generic=[1.5, 2.0, 0.3])), "polyval": (lambda f: lambda a, x: f([a, a * a], x), BINARY[:4]),
    "accumulate_n": (lambda f: lambda a, b: f([a, b]), BINARY[:1]), "add_n": (lambda f: lambda a, b: f([a, b]), BINARY[:1]),
    "scalar_mul": (lambda f: f, points(generic=(np.array(0.7), normal(3)))),
    "floormod": (lambda f: f, points(generic=([1.7, -2.3], [0.6, 0.9]), exact=([2.0, 4.0], [1.0, 2.0]))),
    "mod": (lambda f: f, points(generic=([1.7, -2.3], [0.6, 0.9]), exact=([2.0, 4.0], [1.0, 2.0]))),
    "fmod": (lambda f: f, points(generic=([1.7, -2.3], [0.6, 0.9]), exact=([2.0, 4.0], [1.0, 2.0]))),
    "ldexp": (lambda f: lambda x: f(x, c([1, 2, 3])), points(generic=normal(3))),
    "categorical_crossentropy": (lambda f: lambda p: f(c(LABELS), p), PROBABILITIES),
    "binary_crossentropy": (lambda f: lambda p: f(c(LABELS), p), PROBABILITIES),
    "sparse_categorical_crossentropy": (lambda f: lambda p: f(c([1, 0]), p), PROBABILITIES),
    "softmax_cross_entropy_with_logits": (lambda f: lambda y, p: f(labels=y, logits=p),
                                          [(n, [PROBABILITIES[0][1][0], a]) for n, (a,) in LOGITS]),
    "sigmoid_cross_entropy_with_logits": (lambda f: lambda y, p: f(labels=y, logits=p),
                                          [(n, [PROBABILITIES[0][1][0], a]) for n, (a,) in LOGITS]),
    "weighted_cross_entropy_with_logits": (lambda f: lambda y, p: f(labels=y, logits=p, pos_weight=2.0),
                                           [(n, [PROBABILITIES[0][1][0], a]) for n, (a,) in LOGITS]),
    "sparse_softmax_cross_entropy_with_logits": (lambda f: lambda p: f(labels=c([1, 0]), logits=p), LOGITS),
    "log_poisson_loss": (lambda f: f, points(generic=([1.0, 2.0], [0.3, 0.7]))),
    "softmax": (lambda f: f, LOGITS), "log_softmax": (lambda f: f, LOGITS), "sparsemax": (lambda f: f, LOGITS),
    "ctc_loss": (lambda f: _ctc(f), points(generic=normal(2, 5, 4), zeros=np.zeros((2, 5, 4)))),
    "psnr": (lambda f: lambda a, b: f(a, b, 1.0), BINARY[:4]),
    "moments": (lambda f: lambda x: f(x, [0]), [*UNARY, *TABLE]),
    "weighted_moments": (lambda f: lambda x, w: f(x, [0], w), BINARY[1:4]),
    "sufficient_statistics": (lambda f: lambda x: f(x, [0])[1:3], UNARY[:3]),
    "normalize_moments": (lambda f: lambda a, b: f(c(4.0, ) if False else tf.constant(4.0, tf.float64), a, b, None), BINARY[:2]),
    "batch_normalization": (None, None), "layer_normalization": (lambda f: lambda x: f(x), TABLE),
    "rms_normalization": (lambda f: lambda x: f(x), TABLE), "l2_normalize": (lambda f: lambda x: f(x, -1), [*UNARY, *TABLE]),
    "l2_loss": (lambda f: f, UNARY), "zero_fraction": (lambda f: f, UNARY[:1]),
    "bias_add": (lambda f: f, points(generic=(normal(2, 3), normal(3)))),
    "lrn": (lambda f: lambda x: f(tf.cast(x, tf.float32)), []), "dropout": (lambda f: lambda x: f(x, 0.0), UNARY[:1]),
    "isotonic_regression": (lambda f: lambda x: f(x[None])[0], UNARY),
    "embedding_lookup": (lambda f: lambda t: f(t, c([0, 0, 2])), points(repeated=normal(3, 2))),
    "dot_product_attention": (lambda f: lambda q, k, v: f(q, k, v),
                              points(generic=(normal(1, 3, 1, 2), normal(1, 3, 1, 2, seed=1), normal(1, 3, 1, 2, seed=2)),
                                     zeros=(np.zeros((1, 2, 1, 2)),) * 3)),
    **{name: (lambda f, size=size: lambda x: f(x, size), points(generic=normal(1, 4, 4, 2), ties=np.ones((1, 4, 4, 1))))
       for name, size in (("adaptive_average_pool", (2, 2)), ("adaptive_max_pool", (2, 2)), ("space_to_depth", 2),
                          )},
    "depth_to_space": (lambda f: lambda x: f(x, 2), points(generic=normal(1, 2, 2, 4))),
    "max_pool": (lambda f: lambda x: f(x, 2, 2, "VALID" if f is tf.nn.max_pool else "valid"), IMAGE),
    "average_pool": (lambda f: lambda x: f(x, 2, 2, "same"), IMAGE),
    "avg_pool": (lambda f: lambda x: f(x, 2, 2, "SAME"), IMAGE), "avg_pool2d": (lambda f: lambda x: f(x, 2, 2, "SAME"), IMAGE),
    "max_pool2d": (lambda f: lambda x: f(x, 2, 2, "SAME"), IMAGE),
    "max_pool1d": (lambda f: lambda x: f(x, 2, 2, "SAME"), points(generic=normal(1, 4, 2), ties=np.ones((1, 4, 1)))),
    "avg_pool1d": (lambda f: lambda x: f(x, 2, 2, "SAME"), points(generic=normal(1, 4, 2))),
    "max_pool3d": (lambda f: lambda x: f(x, 2, 2, "VALID"), points(generic=normal(1, 2, 2, 2, 1), ties=np.ones((1, 2, 2, 2, 1)))),
    "avg_pool3d": (lambda f: lambda x: f(x, 2, 2, "VALID"), points(generic=normal(1, 2, 2, 2, 1))),
    "pool": (lambda f: lambda x: f(x, [2, 2], "MAX", strides=[2, 2]), IMAGE),
    "max_pool_with_argmax": (lambda f: lambda x: f(x, 2, 2, "SAME")[0], IMAGE),
    "conv": (lambda f: lambda x, k: f(x, k), points(generic=(normal(1, 4, 1), normal(2, 1, 1)))),
    "conv_transpose": (None, None),
    "depthwise_conv": (lambda f: lambda x, k: f(x, k), points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1)))),
    "separable_conv": (lambda f: lambda x, d, p: f(x, d, p),
                       points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1), normal(1, 1, 1, 2)))),
    "conv1d": (lambda f: lambda x, k: f(x, k, 1, "SAME"), points(generic=(normal(1, 4, 1), normal(2, 1, 1)))),
    "conv2d": (lambda f: lambda x, k: f(x, k, 1, "SAME"), points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1)))),
    "conv3d": (lambda f: lambda x, k: f(x, k, [1] * 5, "SAME"), points(generic=(normal(1, 2, 2, 2, 1), normal(2, 2, 2, 1, 1)))),
    "convolution": (lambda f: lambda x, k: f(x, k, padding="SAME"), points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1)))),
    "conv1d_transpose": (lambda f: lambda x, k: f(x, k, (1, 6, 1), 2), points(generic=(normal(1, 3, 1), normal(2, 1, 1)))),
    "conv2d_transpose": (lambda f: lambda x, k: f(x, k, (1, 4, 4, 1), 2), points(generic=(normal(1, 2, 2, 1), normal(2, 2, 1, 1)))),
    "conv3d_transpose": (lambda f: lambda x, k: f(x, k, (1, 2, 2, 2, 1), 2),
                         points(generic=(normal(1, 1, 1, 1, 1), normal(2, 2, 2, 1, 1)))),
    "atrous_conv2d": (lambda f: lambda x, k: f(x, k, 2, "SAME"), points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1)))),
    "atrous_conv2d_transpose": (lambda f: lambda x, k: f(x, k, (1, 3, 3, 1), 2, "SAME"),
                                points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1)))),
    "depthwise_conv2d": (lambda f: lambda x, k: f(x, k, [1] * 4, "SAME"), points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1)))),
    "depthwise_conv2d_backprop_filter": (lambda f: lambda x, g: f(x, [2, 2, 1, 1], g, [1] * 4, "SAME"),
                                         points(generic=(normal(1, 3, 3, 1), normal(1, 3, 3, 1, seed=1)))),
    "depthwise_conv2d_backprop_input": (lambda f: lambda k, g: f([1, 3, 3, 1], k, g, [1] * 4, "SAME"),
                                        points(generic=(normal(2, 2, 1, 1), normal(1, 3, 3, 1)))),
    "separable_conv2d": (lambda f: lambda x, d, p: f(x, d, p, [1] * 4, "SAME"),
                         points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1, 1), normal(1, 1, 1, 2)))),
    "dilation2d": (lambda f: lambda x, k: f(x, k, [1] * 4, "SAME", "NHWC", [1] * 4),
                   points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1)), ties=(np.ones((1, 3, 3, 1)), np.zeros((2, 2, 1))))),
    "erosion2d": (lambda f: lambda x, k: f(x, k, [1] * 4, "SAME", "NHWC", [1] * 4),
                  points(generic=(normal(1, 3, 3, 1), normal(2, 2, 1)))),
    "unfold": (lambda f: lambda x: f(x, 2), points(generic=normal(1, 1, 3, 3))), "fold": (None, None),
    "compute_average_loss": (lambda f: f, UNARY[:1]), "scale_regularization_loss": (lambda f: f, UNARY[:1]),
    "with_space_to_batch": (None, None), "space_to_batch": (lambda f: lambda x: f(x, [2, 2], [[0, 0], [0, 0]]), IMAGE),
    "stop_gradient": (None, None),
}  # fmt: skip


def _ctc(f: Any) -> Any:
    labels, lengths = np.array([[1, 2], [3, 1]]), np.array([2, 2])
    if f is keras.ops.ctc_loss:
        return lambda x: f(c(labels), x, c(lengths), c(np.array([5, 5])))
    return lambda x: f(c(labels), x, c(lengths), c(np.array([5, 5])), logits_time_major=False, blank_index=0)


_NUMBERS = "its result is not a float, or does not depend on a float argument: there is nothing to differentiate"
_STEPS = "piecewise constant by definition: its gradient is zero or None"
_PLAIN = "not a function of numbers (serialisation, look-up of names, wrappers)"
_SAMPLED = "draws random candidates anew at each call: its slope is not defined"
LEFT_OUT: dict[str, str] = {
    name: reason
    for reason, names in {
        _NUMBERS: "all any allclose argmax argmin argpartition argsort arange bartlett bincount bitwise_and bitwise_invert "
        "bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman count_nonzero digitize dtype "
        "empty empty_like equal eye full full_like gcd geomspace greater greater_equal hamming hanning histogram identity "
        "in_top_k is_tensor isclose isfinite isin isinf isnan isneginf isposinf isreal kaiser lcm left_shift less less_equal "
        "linspace logical_and logical_not logical_or logical_xor logspace matrix_rank multi_hot nanargmax nanargmin ndim "
        "nonzero not_equal one_hot ones ones_like right_shift searchsorted shape signbit size tri unique unravel_index zeros "
        "zeros_like confusion_matrix invert_permutation is_finite is_inf is_nan is_non_decreasing is_strictly_increasing "
        "reduce_all reduce_any sobol_sample nextafter collapse_repeated compute_accidental_hits ctc_beam_search_decoder "
        "ctc_greedy_decoder ctc_unique_labels ctc_decode convert_to_numpy",
        _STEPS: "ceil floor round rint sign trunc heaviside floor_divide floordiv zero_fraction stop_gradient",
        _PLAIN: "get serialize deserialize custom_gradient convert_to_tensor with_space_to_batch ptp",
        _SAMPLED: "all_candidate_sampler fixed_unigram_candidate_sampler learned_unigram_candidate_sampler nce_loss "
        "sampled_softmax_loss fractional_avg_pool fractional_max_pool",
        "takes sparse tensors, which this sweep does not make": "embedding_lookup_sparse safe_embedding_lookup_sparse",
        "its gradient is that of tf.nn.batch_normalization's formula in layers.BatchNormalization, swept there":
        "batch_norm_with_global_normalization",
        "float32 only in TensorFlow: differences in float64 are not possible": "lrn local_response_normalization",
        "computes in float32 (or casts to it) whatever it is given: no slope in float64": "ctc_loss view_as_complex "
        "approx_max_k approx_min_k avg_pool3d max_pool3d",
        "not supported on TensorFlow": "vectorize",
        "covered by the layers of the same name": "conv_transpose fold",
        "the exponent of nextafter is not differentiable": "",
    }.items()
    for name in names.split()
}  # fmt: skip
LEFT_OUT.pop("ptp")


def calls_of(module: str, name: str, f: Any) -> Any:
    """``(label, call, points)`` per way of calling a function, or why it is left out."""
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    if name == "batch_normalization":
        x, m, v = normal(3, 2), normal(2), np.array([0.5, 2.0])
        call = (
            (lambda x, m, v: f(x, m, v, -1))
            if module == "keras.ops"
            else (lambda x, m, v: f(x, m, v, None, None, 1e-3))
        )
        return [("", call, points(generic=(x, m, v), zero_variance=(x, m, np.zeros(2))))]
    if name in RECIPES:
        make, at = RECIPES[name]
        return [("", make(f), at)]
    for at in (UNARY, BINARY):
        try:
            arguments = [tf.constant(a) for a in at[1][1]]
            result = tf.nest.flatten(f(*arguments))
            if any(
                tf.convert_to_tensor(y).dtype.is_floating or tf.convert_to_tensor(y).dtype.is_complex for y in result
            ):
                return [("", f, at)]
        except Exception:  # noqa: BLE001  the other way of calling it is tried next
            continue
    return "NO RECIPE"


Y3 = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
REGRESSION = {
    "generic": (normal(2, 3), normal(2, 3, seed=1)), "equal": (normal(2, 3), normal(2, 3)),
    "zeros": (np.zeros((2, 3)), np.zeros((2, 3))), "zero targets": (np.zeros((2, 3)), normal(2, 3)),
    "zero predictions": (normal(2, 3), np.zeros((2, 3))), "far": (normal(2, 3), 100 * normal(2, 3, seed=1)),
}  # fmt: skip
POSITIVE = {name: (np.abs(y), np.abs(p)) for name, (y, p) in REGRESSION.items()}
CLASSES = {
    "generic": (Y3, np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])), "exact": (Y3, Y3), "reversed": (Y3, Y3[::-1]),
    "equal": (Y3, np.full((2, 3), 1 / 3)), "zeros": (Y3, np.zeros((2, 3))),
}  # fmt: skip
SIGNS = {
    "generic": (2 * Y3 - 1, normal(2, 3)),
    "on the hinge": (2 * Y3 - 1, 2 * Y3 - 1),
    "zeros": (2 * Y3 - 1, np.zeros((2, 3))),
}
SPARSE = {name: (np.array([1, 0]), p) for name, (_, p) in CLASSES.items()}
LOSSES: dict[str, Any] = {
    **{n: (getattr(kloss, n), REGRESSION) for n in
       ("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "Huber", "LogCosh", "CosineSimilarity")},
    **{n: (getattr(kloss, n), POSITIVE) for n in ("MeanSquaredLogarithmicError", "Poisson", "KLDivergence")},
    **{n: (getattr(kloss, n), CLASSES) for n in
       ("BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy", "CategoricalFocalCrossentropy",
        "CategoricalGeneralizedCrossEntropy", "Dice", "Tversky")},
    **{n: (getattr(kloss, n), SIGNS) for n in ("Hinge", "SquaredHinge", "CategoricalHinge")},
    "SparseCategoricalCrossentropy": (kloss.SparseCategoricalCrossentropy, SPARSE),
    "CTC": "casts to float32 inside: no slope in float64",
    "Circle": (kloss.Circle, {"generic": (np.array([0, 0, 1]), normal(3, 4)), "equal": (np.array([0, 0, 1]), np.ones((3, 4))),
                              "zeros": (np.array([0, 0, 1]), np.zeros((3, 4)))}),
    "Loss": "the abstract base class",
}  # fmt: skip

V, S, P1, P2, P3 = (3, 5), (3, 4, 5), (3, 6, 2), (2, 6, 6, 2), (2, 4, 4, 4, 2)
_PREPROCESSING = (
    "preprocessing of pictures or data: no gradient is promised, and its random choices differ at each call"
)
_WORDS = "takes integers or words and gives integers: nothing to differentiate"
_FOREIGN = "wraps a function or model of another framework or a saved one: nothing of its own to differentiate"


def _layers() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def add(names: str, shape: Any, *values: Any, **settings: Any) -> None:
        for name in names.split():
            found[name] = (lambda name=name: getattr(kl, name)(*values, **settings), shape)

    add("ActivityRegularization Identity Flatten ReLU LeakyReLU PReLU ELU Softmax UnitNormalization Layer", V)
    add(
        "LayerNormalization RMSNormalization BatchNormalization Dropout GaussianDropout GaussianNoise AlphaDropout",
        V,
        *[],
    )
    for name in ("Dropout", "GaussianDropout", "GaussianNoise", "AlphaDropout"):
        add(name, V, 0.3)
    for name in ("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"):
        add(name, {"1": P1, "2": P2, "3": P3}[name[-2]], 0.3)
    add("Activation", V, "tanh")
    add("Dense", V, 4, activation="relu")
    add("EinsumDense", S, "abc,cd->abd", output_shape=(None, 3))
    add("Rescaling", V, 0.5)
    add("Masking RepeatVector", S)
    add("RepeatVector", V, 3)
    add("Permute", S, (2, 1))
    add("Reshape", S, (20,))
    add("Lambda", V, lambda x: x * x)
    add("GroupNormalization", (3, 4), groups=2)
    add("Normalization", V, axis=None, mean=0.0, variance=1.0)
    found["SpectralNormalization"] = (lambda: kl.SpectralNormalization(kl.Dense(4)), V)
    for d, shape in (("1", P1), ("2", P2), ("3", P3)):
        add(f"AveragePooling{d}D AvgPool{d}D MaxPooling{d}D MaxPool{d}D GlobalAveragePooling{d}D GlobalAvgPool{d}D "
            f"GlobalMaxPooling{d}D GlobalMaxPool{d}D UpSampling{d}D ZeroPadding{d}D Cropping{d}D", shape)  # fmt: skip
        add(f"AdaptiveAveragePooling{d}D AdaptiveMaxPooling{d}D", shape, 2)
        add(f"Conv{d}D Convolution{d}D Conv{d}DTranspose Convolution{d}DTranspose", shape, 3, 2)
        if d != "3":
            add(f"DepthwiseConv{d}D", shape, 2)
            add(f"SeparableConv{d}D SeparableConvolution{d}D", shape, 3, 2)
    add("ConvLSTM1D", (2, 3, 4, 2), 2, 2)
    add("ConvLSTM2D", (2, 2, 4, 4, 1), 2, 2)
    add("ConvLSTM3D", (1, 2, 3, 3, 3, 1), 1, 2)
    add("LSTM GRU SimpleRNN", S, 3)
    found["RNN"] = (lambda: kl.RNN(kl.GRUCell(3)), S)
    found["StackedRNNCells"] = "a cell: swept inside RNN"
    found["LSTMCell"] = found["GRUCell"] = found["SimpleRNNCell"] = "a cell: swept inside its layer"
    found["Bidirectional"] = (lambda: kl.Bidirectional(kl.LSTM(2)), S)
    found["TimeDistributed"] = (lambda: kl.TimeDistributed(kl.Dense(2)), S)
    add("Add Subtract Multiply Average Maximum Minimum Concatenate", [V, V])
    add("Dot", [V, V], axes=1)
    add("Attention AdditiveAttention", [S, S])
    found["MultiHeadAttention"] = (lambda: kl.MultiHeadAttention(2, 3), (S, S))
    found["GroupQueryAttention"] = (lambda: kl.GroupQueryAttention(4, 4, 2), (S, S))
    found["Embedding"] = (lambda: kl.Embedding(6, 3), np.array([[0, 1, 1], [2, 2, 5]]))
    found["ReversibleEmbedding"] = (lambda: kl.ReversibleEmbedding(6, 3), np.array([[0, 1, 1], [2, 2, 5]]))
    add("Resizing", P2, 4, 4)
    add("CenterCrop", P2, 4, 4)
    add("MelSpectrogram", (2, 64), fft_length=16, sequence_stride=8, num_mel_bins=4)
    found["STFTSpectrogram"] = (lambda: kl.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8), (2, 32, 1))
    left_out = {
        _PREPROCESSING: "AugMix AutoContrast ContrastLimitedAdaptiveHistogramEqualization CutMix Equalization MaxNumBoundingBoxes "
        "MixUp Pipeline RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop "
        "RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue RandomInvert "
        "RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness RandomShear RandomTranslation "
        "RandomZoom Solarization",
        _WORDS: "CategoryEncoding Discretization HashedCrossing Hashing IntegerLookup StringLookup TextVectorization",
        _FOREIGN: "FlaxLayer JaxLayer TFSMLayer TorchModuleWrapper",
        "not a computation": "InputLayer InputSpec Wrapper Layer",
    }  # fmt: skip
    found.update({name: reason for reason, names in left_out.items() for name in names.split()})
    return found


LAYERS = _layers()


def data_of(shape: Any) -> Points:
    """Data for a layer: drawn, all zeros, all equal."""

    def filled(value: Any) -> Any:
        if isinstance(shape, np.ndarray):
            return shape
        if isinstance(shape, list):
            return [value(s) for s in shape]
        if isinstance(shape[0], tuple):
            return tuple(value(s) for s in shape)
        return value(shape)

    seeds = iter(range(9))
    kinds = {
        "generic": lambda s: normal(*s, seed=next(seeds)).astype("float32"), "zeros": lambda s: np.zeros(s, "float32"),
        "ties": lambda s: np.ones(s, "float32"),
    }  # fmt: skip
    return [(name, filled(kind)) for name, kind in list(kinds.items())[: 1 if isinstance(shape, np.ndarray) else 3]]


#: Truth behind what was found, in words with numbers: filled by functions that compute it.
CONFIRMED: dict[str, Callable[[], str]] = {}

PAGE = """# Gradients of the library

What Keras {keras} and TensorFlow {tensorflow} give as gradients, swept by `python benchmarks/sweep_keras.py`: {names} public functions, losses and
layers, {rows} pairs of argument and point: generic ones, zeros, ties, equal arguments, repeated indices, saturation, broadcast
shapes and edges of the domain. Gradients in float64, against left and right difference quotients of every entry (layers: `check_layer`).
A gradient between left and right slope is a kink, not a fault; where the function itself is not finite, nothing is said.

## Wrong, NaN or missing
"""
