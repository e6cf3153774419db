"""A plain function on torch: its Jacobians by backpropagation and by differences, in float64 where it can be.

A function with float32 constants or parameters inside cannot simply be called with float64. Its operations can: below
autograd, every small float that enters one is widened, and every request for a small float type asks for the wider one.
Only the forward pass runs that way; the gradient stays the one the user's own code computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_gradwatch.backends.torch_graph import Graph, Tape, undisturbed

_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip

#: Doubles that one call may hold for perturbed copies of an argument: 16 MB.
_CHUNK_ELEMENTS = 2_000_000


class Function:
    """``f`` run once at its arguments.

    Attributes:
        rows: real numbers in its result.
        wide: numeric differences are taken in float64.
        sizes: number of elements per argument.
        used: per argument, whether the result depends on it.
    """

    def __init__(self, f: Callable[..., Any], arguments: Sequence[Any]) -> None:
        from keras.src.backend.torch.core import get_device

        # Copies: a function that reads a variable from outside must not seem to depend on what was passed in.
        self._arguments = [torch.as_tensor(value).detach().clone().to(get_device()) for value in arguments]
        self._f = f
        self.sizes = [value.numel() for value in self._arguments]
        tape = Tape()
        leaves = [value.detach().requires_grad_() for value in self._arguments]
        with torch.enable_grad(), undisturbed(), tape:
            result = self._called(*leaves)
        bits = Graph(tape, leaves, result).depends(result)
        self.used = [bool(bits >> i & 1) for i in range(len(leaves))]
        self.rows = result.numel() * (2 if result.is_complex() else 1)
        self.wide = self._can_be_wide()

    def analytic(self) -> list[npt.NDArray[Any]]:
        """Jacobians ``[y.size, x.size]`` by backpropagation; zero where the gradient is None."""
        leaves = [value.detach().requires_grad_() for value in self._arguments]
        with torch.enable_grad(), undisturbed():
            result = self._called(*leaves)
            real = torch.view_as_real(result) if result.is_complex() else result
            flat = real.reshape(-1)
            found = [[_flat(g) for g in self._row(flat, i, leaves)] for i in range(self.rows)]
        return [
            np.stack([_numpy(row[k]) for row in found])
            if found
            else np.zeros((0, _reals(value)), _numpy(_flat(value)).dtype)
            for k, value in enumerate(self._arguments)
        ]

    def numeric(self, index: int, steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Jacobian ``[y.size, x.size]`` of one argument by central differences with a step per real entry."""
        plus, minus, width = self._moved(index, steps)
        return np.ascontiguousarray((plus - minus) / width)

    def sides(self, index: int, steps: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
        """Left and right slopes ``[y.size, x.size]`` of one argument, and the results ``[y.size]`` at its base."""
        plus, minus, width = self._moved(index, steps)
        with torch.no_grad(), undisturbed():
            base = _numpy(_flat(self._run([self._widened(value) for value in self._arguments])).double())
        return 2 * (base[:, None] - minus) / width, 2 * (plus - base[:, None]) / width, base

    def _moved(self, index: int, steps: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
        """Results ``[y.size, x.size]`` on both sides of each real entry, and the distances between the sides."""
        points = [self._widened(value) for value in self._arguments]
        base = _flat(points[index])
        deltas = torch.as_tensor(steps, dtype=torch.float64, device=base.device)

        def at(flat: Any) -> Any:
            value = _joined(flat, points[index])
            result = self._run([*points[:index], value, *points[index + 1 :]])
            return _flat(result).double()

        def moved(entry: Any) -> Any:
            shift = torch.zeros_like(base).index_add(0, entry.reshape(1), deltas[entry].to(base.dtype).reshape(1))
            return at(base + shift), at(base - shift), ((base + shift) - (base - shift)).sum(dtype=torch.float64)

        chunk = max(1, min(256, _CHUNK_ELEMENTS // max(len(steps), 1)))
        found: list[list[npt.NDArray[np.float64]]] = []
        at_once = len(steps) > 1
        with torch.no_grad(), undisturbed():
            for start in range(0, len(steps), chunk):
                entries = torch.arange(start, min(start + chunk, len(steps)), device=base.device)
                if at_once:
                    try:
                        with undisturbed():
                            parts = torch.func.vmap(moved, randomness="same")(entries)
                    except Exception:  # noqa: BLE001  code that cannot be vectorised fails in many ways
                        at_once = False
                if not at_once:
                    parts = tuple(map(torch.stack, zip(*map(moved, entries), strict=True)))
                found.append([part.cpu().numpy() for part in parts])
        if not found:
            return np.zeros((self.rows, 0)), np.zeros((self.rows, 0)), np.zeros(0)
        plus, minus, width = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return plus.T, minus.T, width

    def entries(self, index: int) -> npt.NDArray[np.float64]:
        """The real entries of an argument, flat."""
        return np.asarray(_flat(self._arguments[index]).double().cpu().numpy())

    def epsilon(self, index: int) -> float:
        """Unit of rounding of an argument's dtype."""
        return float(torch.finfo(self._arguments[index].dtype).eps)

    def _row(self, flat: Any, i: int, leaves: Sequence[Any]) -> list[Any]:
        found = (
            torch.autograd.grad(flat[i], leaves, allow_unused=True, retain_graph=True)
            if flat.requires_grad
            else [None] * len(leaves)
        )
        return [torch.zeros_like(leaf) if g is None else g.detach() for g, leaf in zip(found, leaves, strict=True)]

    def _called(self, *values: Any) -> Any:
        result = self._f(*values)
        if not isinstance(result, torch.Tensor):
            result = torch.as_tensor(getattr(result, "value", result))
        if not (result.is_floating_point() or result.is_complex()):
            raise TypeError(f"f returned dtype {result.dtype}. Expected one float or complex tensor.")
        return result

    def _widened(self, value: Any) -> Any:
        return value.to(_WIDER.get(value.dtype, value.dtype)) if self.wide else value

    def _run(self, values: Sequence[Any]) -> Any:
        """The forward pass, each time with the same random numbers."""
        if not self.wide:
            return self._called(*values)
        with _Widening():
            return self._called(*values)

    def _can_be_wide(self) -> bool:
        self.wide = True
        try:
            with torch.no_grad(), undisturbed():
                result = self._run([self._widened(value) for value in self._arguments])
        except Exception:  # noqa: BLE001  whatever cannot run in float64 is differenced in its own precision
            return False
        return result.dtype in (torch.float64, torch.complex128)


def gradient_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a function with a scalar result, as a function: by all its arguments, in one flat vector."""

    def gradient(*values: Any) -> Any:
        with torch.enable_grad():
            leaves = [value if value.requires_grad else value.detach().requires_grad_() for value in values]
            result = f(*leaves)
            found = torch.autograd.grad(result, leaves, create_graph=True, allow_unused=True)
        known = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
        return torch.cat([g.reshape(-1) for g in known])

    return gradient


class _Widening(TorchDispatchMode):  # type: ignore[misc]
    """Runs every operation in float64.

    Raises:
        TypeError: an operation gives a smaller float all the same, or writes into one from outside.
    """

    def __enter__(self) -> Any:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.set_default_dtype(self._default)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and args[0].dtype in _WIDER:
            raise TypeError(f"{func} writes into a {args[0].dtype} from outside")
        made = func(*_wide(args), **_wide(kwargs or {}))
        if any(value.dtype in _WIDER for value in _leaves(made)):
            raise TypeError(f"{func} gives a smaller float whatever comes in")
        return made


def _wide(structure: Any) -> Any:
    if isinstance(structure, torch.Tensor):
        return structure.to(_WIDER[structure.dtype]) if structure.dtype in _WIDER else structure
    if isinstance(structure, torch.dtype):
        return _WIDER.get(structure, structure)
    if isinstance(structure, dict):
        return {key: _wide(value) for key, value in structure.items()}
    return type(structure)(map(_wide, structure)) if type(structure) in (list, tuple) else structure


def _leaves(made: Any) -> list[Any]:
    found = made if isinstance(made, list | tuple) else [made]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _reals(value: Any) -> int:
    return int(value.numel()) * (2 if value.is_complex() else 1)


def _flat(value: Any) -> Any:
    """A tensor as a flat vector of reals, real and imaginary parts side by side."""
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).reshape(-1)


def _joined(flat: Any, like: Any) -> Any:
    """The inverse of :func:`_flat`."""
    if not like.is_complex():
        return flat.reshape(like.shape)
    return torch.view_as_complex(flat.reshape(*like.shape, 2))


def _numpy(value: Any) -> npt.NDArray[Any]:
    """As an array; NumPy has no bfloat16."""
    value = value.detach().cpu()
    array: npt.NDArray[Any] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return array
