# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The columns of a table as numbers of unit size, for the estimators of :mod:`pyro_radial.sklearn`."""

import re
from typing import Any

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils import check_array

from pyro_radial._pyro.checks import warn

# The kinds of dtypes that are numbers, as NumPy's letters.
NUMBER_KINDS = "biufc"
# What pandas calls values that are numbers, and values that can only be categories.
NUMBERS = {"boolean", "integer", "floating", "mixed-integer-float", "decimal", "complex"}
CATEGORIES = {"categorical", "string"}
# Text with more categories than this, and fewer rows for each, is more likely something else.
MANY_CATEGORIES, FEW_ROWS = 10, 5


class Columns:
    """Turn numbers, categories and missing values into standardized numbers.

    Columns of zeros and ones are centered, and keep their unit: over its standard deviation, a rare category would be a
    large number.

    A DataFrame of pandas has columns of numbers, also of dtype object, and each category of its other columns becomes a
    column. An array has numbers alone. A missing number becomes the mean, and a column of zeros and ones tells where;
    missing categories are their own category.
    """

    def fit(self, X: Any, weights: np.ndarray) -> "Columns":
        """Learn categories, means and scales from rows with weights; raise a ValueError that names a column."""
        self._is_table = hasattr(X, "iloc")
        self._names: list[Any] = list(X.columns if self._is_table else range(X.shape[1]))
        missing = np.asarray(X.isna() if self._is_table else X != X).all(0)
        if missing.any():
            name = self._names[int(missing.argmax())]
            raise ValueError(f"X: column {name!r} must have a value, got none in {len(X)} rows")
        self._categories = _category_columns(X) if self._is_table else []
        self._one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        if self._categories:
            self._one_hot.fit(self._category_values(X))
        numbers = self._encode(X)
        scaler = StandardScaler().fit(numbers, sample_weight=weights)
        self._means = scaler.mean_
        is_indicator = (np.isin(numbers, (0.0, 1.0)) | np.isnan(numbers)).all(0)
        self._scales = np.where(is_indicator, 1.0, scaler.scale_)
        # After scaling the mean is zero.
        self._imputer = SimpleImputer(strategy="constant", fill_value=0.0, add_indicator=True)
        self._imputer.fit(self._standardize(numbers))
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the numbers of a table or an array with the columns of the training, and warn of new categories."""
        # scikit-learn compares only names that are strings.
        names = list(getattr(X, "columns", self._names))
        if names != self._names and (self._is_table or {*names} == {*self._names}):
            raise ValueError(
                f"X must have the columns of the training in their order, {self._names}, got {names}"
            )
        if self._is_table and not hasattr(X, "iloc"):
            from pandas import DataFrame

            X = DataFrame(X, columns=self._names)
        self._warn_of_unseen(X)
        return self._imputer.transform(self._standardize(self._encode(X)))

    def _standardize(self, numbers: np.ndarray) -> np.ndarray:
        return (numbers - self._means) / self._scales

    def _encode(self, X: Any) -> np.ndarray:
        """Return the columns of numbers as floats, NaN where they are missing, and then one of each category."""
        blocks = [
            self._floats(X, index)
            for index in range(len(self._names))
            if index not in self._categories
        ]
        if self._categories:
            blocks.append(self._one_hot.transform(self._category_values(X)))
        return np.hstack(blocks)

    def _floats(self, X: Any, index: int) -> np.ndarray:
        """Return a column of numbers as floats."""
        try:
            return check_array(
                _column(X, index, NUMBER_KINDS), dtype=np.float64, ensure_all_finite="allow-nan"
            )
        except (TypeError, ValueError) as error:
            advice = "" if "infinity" in str(error) else "; a DataFrame takes categories too"
            raise type(error)(
                f"X: column {self._names[index]!r} must hold finite numbers{advice}: {error}"
            ) from error

    def _category_values(self, X: Any) -> np.ndarray:
        return np.hstack([_column(X, index) for index in self._categories])

    def _warn_of_unseen(self, X: Any) -> None:
        """Warn of categories that the training did not have, by column; all columns of such a category are zero."""
        for number, index in enumerate(self._categories):
            training_categories = self._one_hot.categories_[number]
            unseen = _distinct(_column(X, index)[:, 0]) - _distinct(training_categories)
            if unseen:
                warn(
                    f"X: column {self._names[index]!r} has categories that training did not have, "
                    f"{sorted(map(str, unseen))}; the network treats them as unknown"
                )


def _column(X: Any, index: int, kinds_as_they_are: str = "") -> Any:
    """Return a column ``[N, 1]`` of a table or an array; columns of a table as objects, with NaN where one is missing.

    :param str kinds_as_they_are: the kinds of dtypes, as NumPy's letters, whose columns need no change.
    """
    if not hasattr(X, "iloc"):
        return X[:, [index]]
    column = X.iloc[:, [index]]
    if column.dtypes.iloc[0].kind in kinds_as_they_are:
        return column
    values = column.to_numpy(dtype=object, copy=True)
    values[column.isna().to_numpy()] = np.nan
    return values


def _distinct(values: np.ndarray) -> set[Any]:
    """Return the values without repeats, with one name for all that are missing."""
    return {value if value == value else "(missing)" for value in values}


def _category_columns(X: Any) -> list[int]:
    """Return the indices of a table's columns without numbers; warn of text that hardly stands for categories."""
    from pandas.api.types import infer_dtype

    indices = []
    for index, dtype in enumerate(X.dtypes):
        column = X.iloc[:, index]
        kind = "floating" if dtype.kind in NUMBER_KINDS else infer_dtype(column, skipna=True)
        if kind not in NUMBERS | CATEGORIES:
            raise ValueError(
                f"X: column {column.name!r} must hold numbers or categories, got {dtype} of kind {kind!r}"
            )
        if kind in CATEGORIES:
            indices.append(index)
        if kind == "string":
            _warn_of_text(column.name, column.dropna())
    return indices


def _warn_of_text(name: Any, texts: Any) -> None:
    """Warn of a column of text that has too many values to stand for categories, or many that begin with a digit."""
    categories = texts.unique()
    has_few_rows = len(texts) < FEW_ROWS * len(categories)
    if len(categories) > MANY_CATEGORIES and (
        has_few_rows or all(re.match(r"\s*[-+.,]?\d", text) for text in categories)
    ):
        warn(
            f"X: column {name!r} is text with {len(categories)} different values in {len(texts)} rows, and each "
            f"becomes a category, such as {categories[0]!r}. Convert numbers with pandas.to_numeric, and drop names of "
            "rows. If these are categories, convert the column with astype('category')"
        )
