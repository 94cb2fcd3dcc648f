# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The columns of a table as numbers of unit size, for the estimators of :mod:`pyro_radial.sklearn`."""

from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.utils import check_array

from pyro_radial._pyro.checks import warn


class Columns:
    """Turn numbers, categories and missing values into standardized numbers.

    Columns of zeros and ones are centered, and keep their unit: over its standard deviation, a rare category would be a
    large number.

    A DataFrame of pandas has columns of numbers, and each category of its other columns becomes a column. An array has
    numbers alone. A missing number becomes the mean, and a column of zeros and ones tells where; missing categories are
    their own category.
    """

    def fit(self, X: Any, weights: np.ndarray) -> "Columns":
        """Learn categories, means and scales from rows with weights; raise a ValueError that names a column."""
        is_table = hasattr(X, "iloc")
        missing = np.asarray(X.isna() if is_table else X != X).all(0)
        if missing.any():
            name = _names(X)[int(missing.argmax())]
            raise ValueError(f"X: column {name!r} must have a value, got none in {len(X)} rows")
        self._encoder = _encoder_of(X)
        numbers = self._encoder.fit_transform(X)
        scaler = StandardScaler().fit(numbers, sample_weight=weights)
        self._means = scaler.mean_
        is_indicator = (np.isin(numbers, (0.0, 1.0)) | np.isnan(numbers)).all(0)
        self._scales = np.where(is_indicator, 1.0, scaler.scale_)
        # After scaling the mean is zero.
        self._imputer = SimpleImputer(strategy="constant", fill_value=0.0, add_indicator=True)
        self._imputer.fit(self._standardize(numbers))
        return self

    def _standardize(self, numbers: np.ndarray) -> np.ndarray:
        return (numbers - self._means) / self._scales

    def transform(self, X: Any) -> np.ndarray:
        """Return the numbers of a table or an array with the columns of the training."""
        numbers = self._standardize(self._encoder.transform(X))
        return self._imputer.transform(numbers)

    def warn_of_unseen(self, X: Any) -> None:
        """Warn of categories that the training did not have, by column; all columns of such a category are zero."""
        _, one_hot, indices = self._encoder.transformers_[1]
        for index, training_categories in zip(
            indices, getattr(one_hot, "categories_", ()), strict=False
        ):
            column = X.iloc[:, index]
            unseen = {*column.dropna()} - {*training_categories}
            if unseen:
                warn(
                    f"X: column {column.name!r} has categories that training did not have, "
                    f"{sorted(map(str, unseen))}; the network treats them as unknown"
                )


def _names(X: Any) -> Any:
    """Return the names of a table's columns, or the numbers of an array's."""
    return getattr(X, "columns", range(X.shape[1]))


def _encoder_of(X: Any) -> ColumnTransformer:
    """Return a transformer that keeps numbers, and makes a column of each category of a table's other columns."""
    dtypes = X.dtypes if hasattr(X, "iloc") else [np.dtype(float)] * X.shape[1]
    numbers = []
    categories = []
    for index, dtype in enumerate(dtypes):
        if dtype.kind in "mM":
            name = X.columns[index]
            raise ValueError(f"X: column {name!r} must hold numbers or categories, got {dtype}")
        if dtype.kind in "biufc":
            numbers.append(index)
        else:
            categories.append(index)
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return ColumnTransformer(
        [("numbers", FunctionTransformer(_floats), numbers), ("categories", one_hot, categories)]
    )


def _floats(X: Any) -> np.ndarray:
    """Return the columns of a table or an array as floats, with NaN where they are missing."""
    columns = []
    for index, name in enumerate(_names(X)):
        column = X.iloc[:, [index]] if hasattr(X, "iloc") else X[:, [index]]
        try:
            columns.append(check_array(column, dtype=np.float64, ensure_all_finite="allow-nan"))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"X: column {name!r} must hold finite numbers; a DataFrame takes categories too: {error}"
            ) from error
    return np.hstack(columns)
