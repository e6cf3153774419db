"""How well the findings work: small models with one known fault each, and healthy ones that look suspicious.

    python benchmarks/faultbench.py [--seeds 0,1,2] [--only dead,ok_] [--check-freq none]

Prints one line per case and seed, and at the end how many faults were found and named, how many findings were beside
the point, and how many healthy models raised an alarm. All data are made up here; a case takes seconds on one core.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from fault_models import (
    BINARY,
    Block,
    Op,
    adam,
    adversarial,
    autoencoder,
    converged,
    dense,
    flat_model,
    glyph_model,
    mixed_float16,
    normal,
    one_unit,
    part_bias,
    quadrant_model,
    residual_conv,
    residual_dense,
    root_of_zero,
    sequence_model,
    sgd,
    siamese,
    squeeze_excite,
    table_hole,
    table_model,
    transformer,
    u_net,
    word_model,
    word_vectors,
)
from keras import initializers, layers, ops

from keras_gradwatch import GradWatch


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, and what should be said about it.

    Attributes:
        expected: the finding that names the fault; empty for a healthy model.
        also: findings that may be added without being beside the point.
        layer: part of the name of the layer at fault; empty when there is none.
        watch: settings for GradWatch.
    """

    name: str
    build: Callable[[np.random.Generator], tuple[keras.Model, tuple[Any, Any]]]
    expected: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    layer: str = ""
    epochs: int = 6
    batch: int = 32
    watch: dict[str, Any] = field(default_factory=dict)


GRADIENT = ("zero_gradient", "vanishing", "stalled")
BROKEN = ("exploding", "nonfinite", "dead_units", "zero_gradient", "oscillating", "saturated")

CASES = (
    # -- gradients that fade
    Case(
        name="fade_sigmoid_9",
        expected=("vanishing",),
        build=lambda r: flat_model(r, *dense([24] * 9, "sigmoid"), optimizer=sgd(0.1)),
    ),
    Case(
        name="fade_sigmoid_split_9",
        expected=("vanishing",),
        build=lambda r: flat_model(r, *dense([24] * 9, "sigmoid", split=True), optimizer=adam(1e-3)),
    ),
    Case(
        name="fade_tanh_small",
        expected=("vanishing",),
        build=lambda r: flat_model(r, *dense([32] * 10, "tanh", kernel_initializer=normal(0.05)), optimizer=sgd(0.05)),
    ),
    Case(
        name="fade_conv_sigmoid",
        expected=("vanishing",),
        build=lambda r: glyph_model(
            r,
            *[layers.Conv2D(6, 3, padding="same", activation="sigmoid") for _ in range(7)],
            layers.GlobalAveragePooling2D(),
            optimizer=adam(1e-3),
        ),
    ),
    Case(
        name="fade_in_time",
        expected=("vanishing",),
        also=("stalled",),
        layer="rnn",
        build=lambda r: sequence_model(
            r,
            layers.SimpleRNN(10, recurrent_initializer=initializers.Orthogonal(0.5)),
            optimizer=adam(1e-3),
            length=50,
            first=True,
        ),
    ),
    # -- gradients that stop
    Case(
        name="stop_round",
        expected=("zero_gradient", "disconnected"),
        also=("vanishing",),
        build=lambda r: flat_model(r, *dense([24], "tanh"), Op(ops.round, name="round"), optimizer=adam(1e-3)),
    ),
    Case(
        name="stop_gradient",
        expected=("disconnected",),
        build=lambda r: flat_model(r, *dense([24], "tanh"), Op(ops.stop_gradient, name="stop"), optimizer=adam(1e-3)),
    ),
    Case(
        name="stop_times_zero",
        expected=("zero_gradient",),
        also=GRADIENT,
        build=lambda r: flat_model(
            r, *dense([24], "tanh"), Op(lambda x: 0.0 * x), *dense([16], "tanh"), optimizer=adam(1e-3)
        ),
    ),
    Case(name="stop_softmax_of_one", expected=("zero_gradient",), also=GRADIENT, build=one_unit),
    # -- training that runs away
    Case(
        name="burst_rate",
        expected=("exploding",),
        also=BROKEN,
        build=lambda r: table_model(r, *dense([24], "tanh"), optimizer=sgd(1.0, momentum=0.95), target=3.0),
    ),
    Case(
        name="burst_raw_features",
        expected=("exploding",),
        also=BROKEN,
        build=lambda r: table_model(r, *dense([16], "linear"), optimizer=sgd(0.01), scale=30.0),
    ),
    Case(
        name="burst_deep_relu",
        expected=("exploding",),
        also=BROKEN,
        build=lambda r: flat_model(r, *dense([48] * 10, "relu", kernel_initializer=normal(0.8)), optimizer=sgd(0.01)),
    ),
    Case(name="burst_residual", expected=("exploding",), also=BROKEN, build=lambda r: residual_dense(r, 16.0)),
    # -- values that break
    Case(
        name="nan_log_layer",
        expected=("nonfinite",),
        also=("exploding",),
        layer="log",
        build=lambda r: flat_model(r, *dense([16], "relu"), Op(ops.log, name="log"), optimizer=adam(1e-3)),
    ),
    Case(name="nan_root_loss", expected=("nonfinite",), also=("exploding",), layer="loss", build=root_of_zero),
    Case(
        name="nan_input",
        expected=("nonfinite",),
        also=("exploding",),
        layer="data",
        build=lambda r: table_hole(r, label=False),
    ),
    Case(
        name="nan_label",
        expected=("nonfinite",),
        also=("exploding",),
        layer="labels",
        build=lambda r: table_hole(r, label=True),
    ),
    # -- units that die
    Case(
        name="dead_bias",
        expected=("dead_units",),
        build=lambda r: flat_model(
            r, *dense([48, 24], "relu", bias_initializer=initializers.Constant(-9.0)), optimizer=sgd(0.05)
        ),
    ),
    Case(
        name="dead_conv_split",
        expected=("dead_units",),
        layer="re_lu",
        build=lambda r: glyph_model(
            r,
            layers.Conv2D(8, 3, bias_initializer=initializers.Constant(-6.0)),
            layers.ReLU(),
            layers.Flatten(),
            optimizer=adam(1e-4),
        ),
    ),
    Case(
        name="dead_two_thirds",
        expected=("dead_units",),
        layer="dense",
        build=lambda r: flat_model(
            r, *dense([96], "relu", bias_initializer=part_bias(0.66, -25.0)), *dense([24], "relu"), optimizer=adam(2e-3)
        ),
    ),
    Case(
        name="dead_inside_block",
        expected=("dead_units",),
        layer="block",
        build=lambda r: flat_model(r, *dense([32], "tanh"), Block(24, -20.0), optimizer=adam(1e-3)),
    ),
    Case(
        name="dead_shifted_input",
        expected=("dead_units",),
        layer="dense",
        build=lambda r: flat_model(
            r,
            *dense([32], "relu", kernel_initializer=initializers.RandomUniform(0.0, 0.2)),
            optimizer=adam(1e-3),
            shift=-20.0,
        ),
    ),
    Case(
        name="dead_one_large_step",
        expected=("dead_units",),
        also=BROKEN,
        build=lambda r: flat_model(r, *dense([48, 24], "relu"), optimizer=sgd(0.3), scale=255.0),
    ),
    # -- layers at their limits
    Case(
        name="limit_tanh_pixels",
        expected=("saturated",),
        also=(*BROKEN, *GRADIENT),
        layer="dense",
        build=lambda r: flat_model(
            r, *dense([48, 24], "tanh", kernel_initializer=normal(1.0)), optimizer=sgd(1e-4), scale=255.0
        ),
    ),
    Case(
        name="limit_sigmoid_bias",
        expected=("saturated",),
        also=GRADIENT,
        build=lambda r: flat_model(
            r,
            *dense([32, 24], "sigmoid", split=True, bias_initializer=initializers.Constant(10.0)),
            optimizer=adam(1e-4),
        ),
    ),
    Case(
        name="limit_adam_rate",
        expected=("saturated",),
        also=(*BROKEN, *GRADIENT),
        batch=8,
        epochs=10,
        build=lambda r: flat_model(r, *dense([32], "tanh"), optimizer=adam(0.5)),
    ),
    # -- losses that swing or stand
    Case(
        name="swing_absolute_error",
        expected=("oscillating",),
        also=("exploding",),
        batch=500,
        epochs=30,
        build=lambda r: table_model(r, *dense([16], "elu"), optimizer=sgd(2.0), loss="mae"),
    ),
    Case(
        name="swing_raw_softmax",
        expected=("oscillating",),
        also=("exploding", "stalled"),
        batch=600,
        epochs=30,
        build=lambda r: glyph_model(r, layers.Flatten(), optimizer=sgd(0.02), scale=60.0),
    ),
    Case(
        name="still_sgd_rate",
        expected=("stalled",),
        build=lambda r: flat_model(r, *dense([48, 24], "relu"), optimizer=sgd(1e-6)),
    ),
    Case(
        name="still_adam_rate",
        expected=("stalled",),
        build=lambda r: table_model(r, *dense([32], "relu"), optimizer=adam(1e-8)),
    ),
    Case(
        name="still_plateau",
        expected=("stalled",),
        epochs=12,
        build=lambda r: quadrant_model(r, loss="mae", optimizer=sgd(0.02), width=3),
    ),
    # -- healthy, though they look suspicious
    Case(name="ok_residual_conv_no_norm", build=residual_conv, epochs=8),
    Case(name="ok_transformer", build=transformer, epochs=8),
    Case(name="ok_u_net", build=u_net),
    Case(name="ok_autoencoder", build=autoencoder, epochs=12),
    Case(name="ok_word_vectors", build=word_vectors),
    Case(name="ok_words_sparse", build=word_model, epochs=8),
    Case(name="ok_siamese", build=siamese, epochs=12),
    Case(name="ok_adversarial", build=adversarial, epochs=10),
    Case(name="ok_mixed_float16", build=mixed_float16),
    Case(name="ok_squeeze_excite", build=squeeze_excite, epochs=15),
    Case(name="ok_converged", build=converged),
    Case(name="ok_gru", build=lambda r: sequence_model(r, layers.GRU(12), optimizer=adam(0.02), length=30), epochs=10),
    Case(
        name="ok_rnn_clipped",
        build=lambda r: sequence_model(r, layers.SimpleRNN(16), optimizer=adam(0.01, clipnorm=0.1), length=15),
        epochs=12,
    ),
    Case(
        name="ok_batch_of_one",
        build=lambda r: table_model(r, *dense([16], "tanh"), optimizer=sgd(0.01)),
        batch=1,
        epochs=3,
    ),
    Case(
        name="ok_batch_of_all",
        build=lambda r: flat_model(r, *dense([32], "relu"), optimizer=adam(0.01)),
        batch=600,
        epochs=60,
    ),
    Case(
        name="ok_plateau_then_falls",
        build=lambda r: quadrant_model(r, loss=BINARY, optimizer=sgd(0.5)),
        batch=16,
        epochs=40,
    ),
    Case(
        name="ok_loss_times_million",
        build=lambda r: table_model(
            r,
            *dense([32, 16], "relu"),
            optimizer=adam(3e-3),
            loss=lambda y, p: 1e6 * ops.mean(ops.square(y - p), axis=-1),
        ),
        epochs=12,
    ),
    Case(
        name="ok_dropout",
        build=lambda r: flat_model(
            r,
            *dense([64], "relu"),
            layers.Dropout(0.5),
            *dense([32], "relu"),
            layers.Dropout(0.5),
            optimizer=adam(2e-3),
        ),
        epochs=12,
    ),
    Case(
        name="ok_sigmoid_normalised",
        build=lambda r: flat_model(
            r,
            *[
                part
                for _ in range(4)
                for part in (layers.Dense(32), layers.BatchNormalization(momentum=0.8), layers.Activation("sigmoid"))
            ],
            optimizer=adam(5e-3),
        ),
        epochs=12,
    ),
    Case(
        name="ok_negative_bias_sparse",
        build=lambda r: flat_model(
            r, *dense([128], "relu", bias_initializer=initializers.Constant(-0.3)), optimizer=adam(2e-3)
        ),
        epochs=8,
    ),
)


def run(case: Case, seed: int, check_freq: Any) -> tuple[set[str], set[str]]:
    """Findings, and the layers named by the expected ones."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model, (x, y) = case.build(np.random.default_rng(seed))
    watch = GradWatch(check_freq=check_freq, verbose=0, **case.watch)
    model.fit(x, y, batch_size=case.batch, epochs=case.epochs, verbose=0, callbacks=[watch])
    found = watch.findings
    layers_named = set(found.layer[found.finding.isin(case.expected)])
    return set(found.finding), layers_named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--only", default="", help="parts of names, comma-separated")
    parser.add_argument("--check-freq", default="epoch", help="as for GradWatch, or none")
    options = parser.parse_args()
    check_freq = None if options.check_freq == "none" else options.check_freq
    seeds = [int(seed) for seed in options.seeds.split(",")]
    cases = [case for case in CASES if any(part in case.name for part in options.only.split(","))]
    totals = dict.fromkeys(("faulty", "found", "named", "layer", "beside", "healthy", "alarms"), 0)
    for case in cases:
        for seed in seeds:
            start = time.perf_counter()
            found, layers_named = run(case, seed, check_freq)
            named, beside = bool(found & set(case.expected)), found - set(case.expected) - set(case.also)
            right_layer = any(case.layer in layer for layer in layers_named)
            good = not found if not case.expected else named and not beside and right_layer
            words = ", ".join(sorted(found)) or "nothing"
            mark, seconds = "good" if good else "BAD ", time.perf_counter() - start
            print(f"{mark} {case.name:26} seed {seed}  {words}  {seconds:.1f} s", flush=True)
            if case.expected:
                counts = {
                    "faulty": 1,
                    "found": bool(found),
                    "named": named,
                    "layer": right_layer,
                    "beside": bool(beside),
                }
            else:
                counts = {"healthy": 1, "alarms": bool(found)}
            totals = {name: total + counts.get(name, 0) for name, total in totals.items()}
    t = totals
    print(
        f"{t['faulty']} faulty runs: {t['found']} found, {t['named']} named right, {t['layer']} with the right layer, "
        f"{t['beside']} with a finding beside the point; {t['healthy']} healthy runs: {t['alarms']} alarms"
    )


if __name__ == "__main__":
    main()
