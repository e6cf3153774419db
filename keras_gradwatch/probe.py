"""What is checked: a model's loss on a batch (or a layer's output) as a function of weights and float inputs.

A :class:`Subject` knows Keras and no backend. Its :meth:`~Subject.loss` runs the user's own code inside a
``StatelessScope``: no variable, metric, seed or average moves, and every call sees the same random masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_gradwatch.backends import undisturbed
from keras_gradwatch.errors import gist
from keras_gradwatch.records import Int64Array, TensorInfo
from keras_gradwatch.shadow import losses_of

_NO_BATCH = "Received a {} that yields no batch. Expected at least one. Check that it is not used up already."


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as ``train_step`` sees it; every leaf has the samples on axis 0."""

    x: Any
    y: Any = None
    sample_weight: Any = None

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """The batch as ``(x, y, sample_weight)``."""
        return self.x, self.y, self.sample_weight

    @property
    def loose_parts(self) -> tuple[str, ...]:
        """Class names of the ragged and sparse leaves; empty when all are dense."""
        import keras

        leaves = keras.tree.flatten(self.parts)
        # Turning into an array is what tells dense tensors apart on every backend.
        return tuple(type(leaf).__name__ for leaf in leaves if leaf is not None and not hasattr(leaf, "__array__"))

    def head(self, count: int) -> Batch:
        """The first ``count`` samples.

        Raises:
            TypeError: a part is ragged or sparse.
        """
        import keras

        if self.loose_parts:
            raise TypeError(
                f"Received a batch that holds a {self.loose_parts[0]}. Expected dense arrays. "
                "Give a probe of dense arrays, or switch the check off with check_freq=None."
            )

        def first(leaf: Any) -> Any:
            return leaf[:count] if len(np.shape(leaf)) else leaf

        return Batch(*(keras.tree.map_structure(first, part) for part in self.parts))

    @property
    def count(self) -> int:
        """Number of samples; 0 when no part has any."""
        import keras

        shapes = [np.shape(leaf) for leaf in keras.tree.flatten(self.parts) if leaf is not None]
        return next((int(shape[0]) for shape in shapes if shape), 0)

    def tiled(self, rows: Sequence[int] | Int64Array) -> Batch:
        """A batch of as many samples made of these rows alone, over and over: it fits what was traced for this one."""
        import keras

        places = np.resize(np.asarray(rows, np.int64), self.count)

        def chosen(leaf: Any) -> Any:
            return keras.ops.take(leaf, places, axis=0) if len(np.shape(leaf)) else leaf

        return Batch(*(keras.tree.map_structure(chosen, part) for part in self.parts))

    @property
    def signature(self) -> tuple[Any, ...]:
        """Structure, shapes and dtypes: batches with the same signature share a traced program."""
        import keras

        leaves = keras.tree.flatten(self.parts)
        return tuple((tuple(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)


def batch_of(data: Any) -> Batch:
    """The first batch of anything that can feed ``fit``.

    Args:
        data: a tuple ``(x, y[, sample_weight])``, a bare array or dict of inputs, a ``tf.data.Dataset``, a
            ``PyDataset``, a ``DataLoader``, a generator, or a callable that returns any of these.

    Raises:
        TypeError: ``data`` is none of these.
        ValueError: it yields no batch, or an empty one, or parts of different lengths.
    """
    import keras

    if callable(data) and not isinstance(data, keras.utils.PyDataset) and not hasattr(data, "__array__"):
        return batch_of(data())
    if isinstance(data, keras.utils.PyDataset):
        if len(data) == 0:
            raise ValueError(_NO_BATCH.format(type(data).__name__))
        return _checked(_unpacked(data[0]))
    if _is_batch(data):
        return _checked(_unpacked(data))
    if isinstance(data, tuple | str | bytes) or not isinstance(data, Iterable):
        kind = f"a tuple of {len(data)} parts" if isinstance(data, tuple) else f"data of type {type(data).__name__}"
        raise TypeError(
            f"Received {kind}. Expected (x, y[, sample_weight]), an array, a dict of inputs, a Dataset, a PyDataset, "
            "a generator, or a callable that returns one of these. Give one of them."
        )
    first = next(iter(data), None)
    if first is None:
        raise ValueError(_NO_BATCH.format(type(data).__name__))
    if isinstance(first, list) and type(data).__name__ == "DataLoader":
        first = tuple(first)  # a DataLoader collates tuples into lists
    return _checked(_unpacked(first))


def arrays_of(batch: Batch) -> Batch:
    """The batch with every leaf an array or tensor, float64 NumPy data brought to ``floatx`` as Keras' adapters do."""
    import keras

    def converted(leaf: Any) -> Any:
        if leaf is None or (hasattr(leaf, "dtype") and not isinstance(leaf, np.ndarray)):
            return leaf
        array = np.asarray(leaf)
        if array.dtype == np.float64:
            return array.astype(keras.config.floatx())
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"Received data of dtype {array.dtype}. Expected numbers. Encode words and categories as numbers first."
            )
        return array

    return Batch(*(keras.tree.map_structure(converted, part) for part in batch.parts))


def check_fits(model: Any, batch: Batch) -> None:
    """Whether a built model can be called with the inputs of a batch.

    Raises:
        ValueError: it cannot.
    """
    import keras

    if not all(layer.built for layer in model._flatten_layers()):
        return  # it will be built on whatever comes first
    try:
        _outputs_of(model, batch.x)
    except Exception as error:
        shapes = keras.tree.map_structure(lambda leaf: tuple(np.shape(leaf)), batch.x)
        expected = keras.tree.map_structure(lambda leaf: tuple(leaf.shape), getattr(model, "input", None))
        raise ValueError(
            f"Received a probe whose inputs have the shapes {shapes}. Expected {expected or 'inputs'} as the model "
            f"takes ({gist(error)}). Give the probe the form of the training data, or a number of "
            "samples to take it from the training batches."
        ) from error


class Subject:
    """A scalar of weights (and float inputs) that can be traced in any dtype.

    Attributes:
        tensors: the moving tensors: trainable weights in network order, then float inputs.
        variables: the Keras variable behind each weight.
        layers, losses, state: everything that must change dtype for a float64 trace; ``state`` is every other variable.
    """

    def __init__(
        self, root: Any, batch: Batch, scalar: Callable[[Any, Any, Any], Any], losses: Sequence[Any] = ()
    ) -> None:
        import keras

        self.root = root
        self.layers = list(root._flatten_layers())
        self.losses = list(losses)
        weights = describe_weights(root)
        self.variables = [variable for _, variable in weights]
        known = {id(v) for v in self.variables}
        self.state = [v for v in every_variable(root) if id(v) not in known]
        self._scalar = scalar
        self._structure = batch.parts
        leaves = keras.tree.flatten(self._structure)
        inputs = len(keras.tree.flatten(batch.x))
        self._moving_leaves = [i for i, leaf in enumerate(leaves) if i < inputs and _is_float(leaf)]
        self.tensors = (*(info for info, _ in weights), *self._inputs(batch, leaves))

    def moving(self) -> list[Any]:
        """Present values of the moving tensors, inputs excluded."""
        return [variable.value for variable in self.variables]

    def split(self, batch: Batch) -> tuple[list[Any], list[Any]]:
        """A batch's leaves as (moving inputs, fixed data)."""
        import keras

        leaves = keras.tree.flatten(batch.parts)
        moving = [leaves[i] for i in self._moving_leaves]
        fixed = [leaf for i, leaf in enumerate(leaves) if i not in self._moving_leaves and leaf is not None]
        return moving, fixed

    def values(self, batch: Batch, weights: Sequence[Any] | None = None) -> tuple[list[Any], list[Any]]:
        """Values for :meth:`loss`: (weights + moving inputs, state + fixed data)."""
        inputs, data = self.split(batch)
        state = [variable.value for variable in self.state]
        return [*(self.moving() if weights is None else weights), *inputs], [*state, *data]

    def loss(self, moving: list[Any], fixed: list[Any]) -> Any:
        """The scalar at given values, without any side effect on the model."""
        import keras

        count, states = len(self.variables), len(self.state)
        inputs, data = iter(moving[count:]), iter(fixed[states:])
        leaves = [
            None if leaf is None else next(inputs) if i in self._moving_leaves else next(data)
            for i, leaf in enumerate(keras.tree.flatten(self._structure))
        ]
        x, y, sample_weight = keras.tree.pack_sequence_as(self._structure, leaves)
        with keras.StatelessScope(collect_losses=True) as scope:
            for variable, value in zip([*self.variables, *self.state], [*moving[:count], *fixed[:states]], strict=True):
                scope.add_update((variable, value))  # stored uncast, unlike state_mapping=
            return self._scalar(x, y, sample_weight)

    def _inputs(self, batch: Batch, leaves: Sequence[Any]) -> Iterator[TensorInfo]:
        names = _input_names(self.root, batch.x)
        for i in self._moving_leaves:
            shape = tuple(int(d) for d in np.shape(leaves[i]))
            yield TensorInfo(layer=names[i], tensor=names[i], role="input", depth=0, shape=shape)


def model_subject(model: Any, batch: Batch, *, training: bool = True) -> Subject:
    """The compiled loss of a model on a batch, exactly as ``fit`` computes it."""
    build_model(model, batch)
    build_loss(model, batch)

    def scalar(x: Any, y: Any, sample_weight: Any) -> Any:
        y_pred = model(x, training=training) if accepts(model.call, "training") else model(x)
        settings = {"training": training} if accepts(model.compute_loss, "training") else {}
        return model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **settings)

    return Subject(model, batch, scalar, losses_of(model))


def layer_subject(layer: Any, batch: Batch, *, training: bool = True, seed: int = 0) -> Subject:
    """A random cotangent times the output of one layer: its gradient is the layer's whole backward pass."""

    def scalar(x: Any, y: Any, sample_weight: Any) -> Any:
        import keras

        settings = {"training": training} if accepts(layer.call, "training") else {}
        outputs = layer(*x, **settings) if isinstance(x, tuple) else layer(x, **settings)
        total = 0.0
        for k, output in enumerate(keras.tree.flatten(outputs)):
            dtype = keras.backend.standardize_dtype(output.dtype)
            if "float" not in dtype:
                continue
            generator = np.random.default_rng([seed, k])
            cotangent = generator.standard_normal([int(d) for d in output.shape])
            total = total + keras.ops.sum(output * keras.ops.convert_to_tensor(cotangent, dtype=dtype))
        return total

    return Subject(layer, batch, scalar)


def prepare_model(model: Any, batch: Batch) -> None:
    """Make sure a model is a compiled, built Keras model that can take this batch.

    Raises:
        TypeError: it is not a Keras model.
        ValueError: it has no loss.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Received an object of type {type(model).__name__}. Expected a compiled keras.Model. "
            "For a single layer use check_layer(layer, x)."
        )
    if not model.compiled:
        raise ValueError(
            f"Received model {model.name!r}, which is not compiled. Expected a model with a loss. "
            "Call model.compile(loss=...) first."
        )
    build_model(model, batch)
    build_loss(model, batch)


def fixed_batch_size(model: Any) -> int | None:
    """The number of samples that a model is made for, ``None`` when it takes any."""
    shapes = [tuple(tensor.shape) for tensor in getattr(model, "inputs", None) or []]
    return next((shape[0] for shape in shapes if shape and shape[0] is not None), None)


def build_model(model: Any, batch: Batch) -> None:
    """Make the variables of a model that ``fit`` would make inside its first step; nothing else about it changes."""
    if all(layer.built for layer in model._flatten_layers()):
        return
    _outputs_of(model, batch.x)


def build_loss(model: Any, batch: Batch) -> None:
    """Make the loss objects that ``compile`` only named; ``fit`` makes the same ones inside its first step."""
    import keras

    compile_loss = getattr(model, "_compile_loss", None)
    if compile_loss is None or compile_loss.built or batch.y is None:
        return
    with keras.name_scope(compile_loss.name):  # as in its own __call__: its metrics' variables carry the name
        compile_loss.build(batch.y, _outputs_of(model, batch.x))


def has_loss(model: Any) -> bool:
    """False when there is no loss to compute on a batch: ``compile`` was given none, and no layer has added one."""
    import keras

    own = type(model).compute_loss is not keras.Model.compute_loss
    return own or model._compile_loss is not None or bool(model.losses)


def prepare_layer(layer: Any, batch: Batch) -> None:
    """Build a layer from the shapes of its input. Symbolically: a hand-written gradient may not run on its own."""
    import keras

    if layer.built:
        return
    inputs = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype)), batch.x
    )
    with undisturbed():
        layer(*inputs) if isinstance(inputs, tuple) else layer(inputs)


def trains_compiled_loss(model: Any) -> bool:
    """False when ``train_step`` is overridden and never calls ``compute_loss``: it trains another loss."""
    import keras

    step = type(model).train_step
    if step is keras.Model.train_step:
        return True
    names: set[str] = set()
    waiting = [step.__code__] if hasattr(step, "__code__") else []
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting.extend(c for c in code.co_consts if inspect.iscode(c))
    return bool(names & {"compute_loss", "_compute_loss", "train_step"}) or not names


def describe_weights(root: Any) -> list[tuple[TensorInfo, Any]]:
    """Every trainable variable with its :class:`TensorInfo`, in network order, each once."""
    found: list[tuple[TensorInfo, Any]] = []
    trainable = {id(v) for v in root.trainable_variables}
    seen: set[int] = set()
    depth = 0
    for path, layer in _walk(root, ""):
        own = [v for v in layer.trainable_variables if id(v) in trainable and id(v) not in seen]
        inner = {id(v) for child in _children(layer) for v in child.trainable_variables}
        own = [v for v in own if id(v) not in inner]
        for variable in own:
            seen.add(id(variable))
            initializer = getattr(layer, f"{variable.name}_initializer", None)
            info = TensorInfo(
                layer=path or layer.name, tensor=variable.path, role="weight", depth=depth, shape=tuple(variable.shape),
                layer_class=type(layer).__name__,
                activation=getattr(getattr(layer, "activation", None), "__name__", ""),
                initializer=type(initializer).__name__ if initializer is not None else "",
            )  # fmt: skip
            found.append((info, variable))
        depth += bool(own)
    return found


def layer_paths(root: Any) -> dict[int, str]:
    """Path of every layer inside the model, by ``id``; the outermost wins where a layer is shared."""
    paths: dict[int, str] = {}
    for path, layer in _walk(root, ""):
        paths.setdefault(id(layer), path or layer.name)
    return paths


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Does a callable take this keyword?"""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _walk(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, layer
    for child in _children(layer):
        yield from _walk(child, f"{path}/{child.name}" if path else child.name)


def _children(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(recursive=False, include_self=False))


def every_variable(root: Any) -> list[Any]:
    """Every variable of a model or layer and of its metrics, each once."""
    found: dict[int, Any] = {}
    for variable in [*root.variables, *(getattr(root, "metrics_variables", None) or [])]:
        found.setdefault(id(variable), variable)
    return list(found.values())


def _outputs_of(model: Any, x: Any) -> Any:
    """Symbolic outputs of a model called as in a step; averages, seeds, added losses and random streams stay."""
    import keras
    from keras.src.backend import compute_output_spec  # calls the model itself; its own method would skip input checks

    def symbol(leaf: Any) -> Any:
        return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))

    with undisturbed():
        return compute_output_spec(model, keras.tree.map_structure(symbol, x))


def _is_float(leaf: Any) -> bool:
    import keras

    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and "float" in keras.backend.standardize_dtype(dtype)


def _input_names(root: Any, x: Any) -> list[str]:
    """Names of the leaves of ``x``: dict keys, the model's own input names, or ``input``, ``input_1`` and so on."""
    import keras

    paths = keras.tree.flatten_with_path(x)
    given = [tensor.name for tensor in getattr(root, "inputs", None) or []]  # functional and sequential models
    names = []
    for i, (path, _) in enumerate(paths):
        if path and isinstance(path[0], str):
            names.append("/".join(str(part) for part in path))
        elif len(given) == len(paths) and not given[i].startswith(("input_layer", "keras_tensor")):
            names.append(given[i])
        else:
            names.append("input" if len(paths) == 1 else f"input_{i}")
    return names


def _is_batch(data: Any) -> bool:
    import keras

    if isinstance(data, tuple):
        return 0 < len(data) <= 3
    is_array = hasattr(data, "dtype") and hasattr(data, "shape")
    return isinstance(data, list | dict) or is_array or keras.ops.is_tensor(data)


def _unpacked(data: Any) -> Batch:
    if isinstance(data, tuple) and len(data) <= 3:
        return Batch(*data)
    return Batch(data)


def _checked(batch: Batch) -> Batch:
    import keras

    lengths = {
        int(np.shape(leaf)[0]) for leaf in keras.tree.flatten(batch.parts) if leaf is not None and len(np.shape(leaf))
    }
    if not lengths or 0 in lengths:
        raise ValueError("Received a batch without samples. Expected at least one. Check how the data are selected.")
    if len(lengths) > 1:
        raise ValueError(
            f"Received x, y and sample_weight of different lengths: {sorted(lengths)} samples. Expected the same "
            "number in all of them. Check how they are cut."
        )
    return batch
