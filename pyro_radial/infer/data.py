# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of inputs and targets, and their mini-batches."""

import copy
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from pyro_radial._pyro.checks import kind_of, warn
from pyro_radial._pyro.compat import tree_leaves, tree_map, tree_map_only
from pyro_radial._pyro.types import Batch

#: A batch of one kind, such as a tensor, or a pair of inputs and targets.
Part = TypeVar("Part", bound=Batch | tuple[Batch, Batch])


class Rows:
    """Take rows by index from all data that :func:`~pyro_radial.fit` takes. Rows of a ``Dataset`` are checked then."""

    def __init__(self, data: object, name: str, dtype: torch.dtype | None = None) -> None:
        self.name, self._dtype = name, dtype
        #: The size of a ``DataLoader``'s batches, and whether it leaves out a smaller last one.
        self.batch_size: int | None = None
        self.drop_last = False
        self._collate: Callable[[list[Any]], Any] | None = None
        self._check: Callable[[Batch], None] = lambda y: None
        source = data.dataset if isinstance(data, DataLoader) else data
        if isinstance(source, IterableDataset):
            raise ValueError(
                f"{name} must be a map-style Dataset, with a length and items by index, got the iterable "
                f"{type(source).__name__}"
            )
        if isinstance(data, DataLoader):
            _check_loader(data, name)
            self.batch_size = data.batch_size
            self.drop_last = data.drop_last
            self._collate = None if data.collate_fn is default_collate else data.collate_fn
        self.dataset = source if isinstance(source, Dataset) else None
        if self.dataset is None:
            if not isinstance(data, tuple | list) or len(data) < 2:
                raise ValueError(
                    f"{name} must be a pair (x, y) of tensors or a torch Dataset, got {kind_of(data)}"
                )
            inputs, targets = _split(data)
            x = _to_tensors(inputs, dtype)
            y = _to_tensors(targets, dtype)
            check_inputs(x, f"{name}: x")
            check_inputs(_fill_missing(y), f"{name}: y")
            if num_rows(x) != num_rows(y):
                raise ValueError(
                    f"{name}: y must have as many rows as x, got {num_rows(y)} for {num_rows(x)}"
                )
            if any(leaf.requires_grad for leaf in tree_leaves((x, y))):
                warn(f"{name} requires gradients, which are left out; pass tensor.detach()")
                x, y = tree_map(Tensor.detach, (x, y))
            #: The inputs and targets in memory; only for data that are not a ``Dataset``.
            self.tensors: tuple[Batch, Batch] = (x, y)
        if len(self) == 0:
            raise ValueError(f"{name} must have at least one row, got none")

    def __len__(self) -> int:
        return len(self.dataset) if self.dataset is not None else num_rows(self.tensors[0])  # type: ignore[arg-type]

    def take(self, index: Tensor) -> tuple[Batch, Batch]:
        """Return the inputs and targets of some rows."""
        if self.dataset is None:
            return take(self.tensors, index)
        batch = self._load(index)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            item_type = type(self.dataset[int(index[0])]).__name__
            raise ValueError(
                f"{self.name}: an item of the Dataset must be a pair (x, y), got {item_type}"
            )
        x, y = _split(batch)
        check_inputs(x, f"{self.name}: x", index)
        check_inputs(_fill_missing(y), f"{self.name}: y", index)
        self._check_targets(y)
        return x, y

    def subset(self, index: Tensor) -> "Rows":
        """Return some of the rows."""
        rows = copy.copy(self)
        if self.dataset is None:
            rows.tensors = self.take(index)
        else:
            rows.dataset = Subset(self.dataset, index.tolist())
        return rows

    def same_as(self, rows: "Rows") -> bool:
        """Return whether others are the same rows in the same order, as far as it can be seen without loading them."""
        if self.dataset is not None or rows.dataset is not None:
            return self.dataset is rows.dataset
        own, leaves = tree_leaves(self.tensors), tree_leaves(rows.tensors)
        return len(own) == len(leaves) and all(map(torch.equal, own, leaves))

    def check_targets(self, check: Callable[[Batch], None]) -> None:
        """Check all targets in memory now, or those of a ``Dataset`` as they are taken."""
        self._check = check
        if self.dataset is None:
            self._check_targets(self.tensors[1])

    def _check_targets(self, y: Batch) -> None:
        try:
            self._check(y)
        except ValueError as error:
            raise ValueError(
                f"{self.name}: {error}{'' if self.dataset is None else ' of a batch'}"
            ) from error

    def all(self) -> tuple[Batch, Batch]:
        """Return every row, in order."""
        return self.take(torch.arange(len(self), device="cpu"))

    def all_inputs(self) -> Batch:
        """Return the inputs of every row, in order, of a ``Dataset`` whose items may have no targets."""
        index = torch.arange(len(self), device="cpu")
        batch = self._load(index)
        if isinstance(batch, tuple | list):
            batch = batch[0] if len(batch) == 1 else _split(batch)[0]
        check_inputs(batch, self.name, index)
        return batch

    def _load(self, index: Tensor) -> Any:
        """Load and collate items of the ``Dataset``."""
        items: list[Any] = [self.dataset[i] for i in index.tolist()]  # type: ignore[index]
        if self._collate is not None:
            return _to_tensors(self._collate(items), self._dtype)
        # Otherwise Python's numbers would have double precision.
        items = [_to_tensors(item, self._dtype) for item in items]
        try:
            return _to_tensors(default_collate(items), self._dtype)
        except RuntimeError as error:
            raise ValueError(
                f"{self.name}: the items of the Dataset must have one shape in all rows, or pass a DataLoader with a "
                f"collate_fn that pads them, got: {error}"
            ) from error


def as_inputs(x: Any, name: str, dtype: torch.dtype | None = None) -> Batch:
    """Convert inputs without targets to tensors."""
    if isinstance(x, Dataset | DataLoader):
        return Rows(x, name, dtype).all_inputs()
    x = _to_tensors(x, dtype)
    check_inputs(x, name)
    if num_rows(x) == 0:
        raise ValueError(f"{name} must have at least one row, got none")
    return x


def check_inputs(x: object, name: str, index: Tensor | None = None) -> None:
    """Raise a ValueError unless ``x`` is a finite tensor of rows, or a tuple or dict of such of one length.

    :param Tensor index: the numbers of the rows, for the error; counted from zero by default.
    """
    named = _name_tensors(x, name)
    if not named:
        raise ValueError(f"{name} must hold at least one tensor, got an empty {type(x).__name__}")
    for label, tensor in named:
        if isinstance(tensor, np.ndarray):
            raise ValueError(f"{label} must hold numbers, got {_describe_non_number(tensor)}")
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise ValueError(
                f"{label} must be a tensor of rows or a tuple of such, got "
                f"{'a tensor without dims' if isinstance(tensor, Tensor) else kind_of(tensor)}"
            )
        # A sum is many times faster to check than all elements, but it can overflow where no element does.
        if tensor.is_floating_point() and not (tensor.sum().isfinite() or tensor.isfinite().all()):
            has_nan = bool(tensor.isnan().any())
            problem = "NaN" if has_nan else "infinity"
            is_nonfinite = tensor.isnan() if has_nan else tensor.isinf()
            rows = is_nonfinite.flatten(1).any(1) if tensor.dim() > 1 else is_nonfinite
            first_position = int(rows.int().argmax())
            row = first_position if index is None else int(index[first_position])
            raise ValueError(
                f"{label} must not hold {problem}, got {problem} in {int(rows.sum())} of {len(tensor)} rows, first in "
                f"row {row}"
            )
    numbers = {len(tensor) for _, tensor in named}
    if len(numbers) != 1:
        raise ValueError(f"{name} must hold tensors of one number of rows, got {sorted(numbers)}")


def _describe_non_number(array: np.ndarray) -> str:
    """Return the first element of an array that is not a number, its row and column, and what to do."""
    for index, value in np.ndenumerate(array):
        if not isinstance(value, Real):
            return (
                f"'{value}' at row and column {list(index)}, counted from 0; encode categories as "
                "numbers, each as a column of zeros and ones, or as 0, 1, ... in targets"
            )
    return "numbers as Python objects; convert the array with astype(float)"


def _fill_missing(y: Batch) -> Batch:
    """Return targets with zeros in place of the missing targets of named outputs."""
    if not isinstance(y, dict):
        return y
    return tree_map_only(Tensor, lambda tensor: tensor.masked_fill(tensor.isnan(), 0), y)


def num_rows(x: Batch) -> int:
    """Return the number of rows of a tensor, or of a tuple or dict of tensors."""
    return len(_name_tensors(x, "")[0][1])


def take(x: Part, index: Tensor | slice) -> Part:
    """Return the rows of a tensor, of a tuple or dict of tensors, or of inputs and targets."""
    return tree_map(lambda tensor: tensor[index], x)


def move(x: object, device: torch.device) -> Any:
    """Return rows on a device."""
    return tree_map(lambda tensor: tensor.to(device), x)


def _name_tensors(x: object, name: str) -> list[tuple[str, Any]]:
    """Return the tensors of a batch, each with a name for errors."""
    if isinstance(x, dict):
        return [(f"{name}[{key!r}]", tensor) for key, tensor in x.items()]
    return [(name, tensor) for tensor in (x if isinstance(x, tuple) else (x,))]


def _split(fields: Any) -> tuple[Any, Any]:
    """Split into inputs, a tuple if there are several, and targets, which come last."""
    *inputs, y = map(_to_tuple, fields)
    return inputs[0] if len(inputs) == 1 else tuple(inputs), y


def _to_tuple(value: object) -> object:
    """Return a list of tensors as a tuple, and all else as it is."""
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return tuple(value)
    return value


def _to_tensors(value: object, dtype: torch.dtype | None) -> Any:
    """Convert NumPy arrays and Python floats to tensors of this floating-point dtype."""

    def convert(array: object) -> Any:
        if isinstance(array, np.ndarray) and array.dtype.kind not in "biufc":
            # check_inputs says what it holds.
            return array
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            # torch has no read-only tensors, and warns.
            array = array.copy()
        tensor = torch.as_tensor(array)
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype or torch.get_default_dtype())

    if isinstance(value, Mapping):
        return {name: _to_tensors(item, dtype) for name, item in value.items()}
    return tree_map_only(np.ndarray | np.generic | float, convert, value)


def _check_loader(loader: DataLoader[Any], name: str) -> None:
    """Raise a ValueError unless the loader passes over each row once, in this process."""
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler or not plain:
        raise ValueError(
            f"{name} must be a DataLoader that passes over each row once, got one with the sampler "
            f"{type(loader.batch_sampler if loader.batch_size is None else sampler).__name__}, which would be lost; "
            "choose rows with a torch Subset instead"
        )
    if loader.num_workers:
        raise ValueError(
            f"{name} must be a DataLoader without workers, got num_workers={loader.num_workers}, which would "
            "be lost; leave it out, and read slow items into tensors first"
        )


class Batches:
    """Take mini-batches: every epoch passes over each row at most once, in its own random order."""

    def __init__(self, rows: Rows, size: int, seed: int, device: torch.device) -> None:
        self.rows, self.size, self.seed, self.device = rows, size, seed, device
        self._latest: tuple[int, Tensor] | None = None
        # Rows on the device, once for all batches, if they fit.
        self._on_device: tuple[Batch, Batch] | None = None
        has_room = rows.dataset is None and device.type != "cpu"
        if has_room and device.type == "cuda":
            # In a quarter of the memory that the device has left.
            free, _ = torch.cuda.mem_get_info(device)
            has_room = sum(tensor.nbytes for tensor in tree_leaves(rows.tensors)) <= free // 4
        if has_room:
            self._on_device = move(rows.tensors, device)

    @property
    def per_epoch(self) -> int:
        """The number of batches in one epoch."""
        if self.rows.drop_last:
            return max(1, len(self.rows) // self.size)
        return -(-len(self.rows) // self.size)

    def get(self, epoch: int, number: int) -> tuple[Batch, Batch]:
        """Return the inputs and targets of one batch of an epoch, both counted from zero."""
        seed = self.seed + epoch
        if self._latest is None or self._latest[0] != seed:
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self.rows), generator=generator, device="cpu")
            self._latest = seed, order if self._on_device is None else _send(order, self.device)
        return self._at(self._latest[1][number * self.size : (number + 1) * self.size])

    def num_rows(self, number: int) -> int:
        """Return the rows of one batch."""
        return min(self.size, len(self.rows) - number * self.size)

    def first_rows(self) -> tuple[Batch, Batch]:
        """Return two rows, or the only one: enough to run model and guide once."""
        return self._at(torch.arange(min(2, len(self.rows)), device="cpu"))

    def _at(self, index: Tensor) -> tuple[Batch, Batch]:
        if self._on_device is not None:
            return take(self._on_device, index.to(self.device))
        return _send(self.rows.take(index), self.device)


def _send(x: Part, device: torch.device) -> Part:
    """Return the rows on a device; from pinned memory, so that nothing waits for the copy."""
    if device.type != "cuda":
        return move(x, device)
    return tree_map(
        lambda tensor: (
            tensor if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)
        ),
        x,
    )


def split_batch(
    batch: tuple[Batch, Batch], number: int
) -> Iterator[tuple[tuple[Batch, Batch], float]]:
    """Split a batch into at most ``number`` parts, each with its share of the rows."""
    if number == 1:
        yield batch, 1.0
        return
    size = num_rows(batch[0])
    for index in torch.arange(size, device="cpu").chunk(number):
        yield take(batch, index), len(index) / size
