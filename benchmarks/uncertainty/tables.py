# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare the estimators for tables, at their defaults, with scikit-learn's networks and gradient boosting.

python -m benchmarks.uncertainty.tables --data-dir DIR
"""

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import accuracy_score, log_loss, root_mean_squared_error
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from benchmarks.common import (
    Claim,
    Job,
    Results,
    Row,
    SizedForm,
    compute_all,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from benchmarks.uncertainty._adult import CATEGORIES, adult
from pyro_radial.sklearn import HIDDEN, BayesianClassifier, BayesianRegressor

NETWORK, PLAIN, STOPPED, TREES = METHODS = "network", "plain network", "plain, early stopping", "trees"
CLASSES = ("adult", "breast cancer", "digits")
NUMBERS = ("diabetes", "concrete")
# The defaults were chosen on splits by seeds from zero.
FIRST_SEED = 100
TITLES = {"log_loss": "log loss", "rmse": "RMSE"}

Table = tuple[np.ndarray, np.ndarray]


def run(output: Path, *, data_dir: Path, form: SizedForm = "default", seeds: int = 3, workers: int = 2) -> None:
    """Fit both on the same rows, score them on the same others, and count the CPU's seconds on one thread.

    Adult has its own test rows, and a seed orders the training alone; of the other sets a seed chooses a fifth of the
    rows for the test. The network is ``BayesianClassifier`` or ``BayesianRegressor``, and each category of Adult is a
    column for it. The plain network is scikit-learn's ``MLPClassifier`` or ``MLPRegressor`` of as many units, at its
    defaults, on standardized columns and targets; once more it stops when a tenth of the rows is predicted no better.
    The trees are ``HistGradientBoostingClassifier`` or ``HistGradientBoostingRegressor``, which know categories.
    Nothing is tuned for a set. The defaults of the estimators were chosen on validation rows of breast cancer, digits,
    diabetes and concrete, with other seeds; the classifier's prior also on 2,000 rows of Adult.
    """
    setting = {"torch": torch.__version__, "sklearn": sklearn.__version__, "form": form}
    results = Results(output, setting)
    names = ("breast cancer", "diabetes") if form == "small" else (*CLASSES, *NUMBERS)
    number = 1 if form == "small" else seeds
    epochs = 2 if form == "small" else None
    jobs = []
    for seed, name, method in itertools.product(range(FIRST_SEED, FIRST_SEED + number), names, METHODS):
        keys = {"data": name, "seed": seed, "method": method}
        jobs.append(Job(keys, score, (data_dir, name, seed, method, epochs)))
    compute_all(results, jobs, workers)


def score(data_dir: Path, name: str, seed: int, method: str, epochs: int | None) -> Row:
    (x, y), (x_test, y_test) = split(data_dir, name, seed)
    estimator = make(name, seed, method, epochs)
    begin = time.process_time()
    estimator.fit(x, y)
    fitted = time.process_time()
    found: Row
    if name in CLASSES:
        probabilities = estimator.predict_proba(x_test)
        predicted = estimator.classes_[probabilities.argmax(1)]
        found = {"log_loss": log_loss(y_test, probabilities), "accuracy": accuracy_score(y_test, predicted)}
    else:
        found = {"rmse": root_mean_squared_error(y_test, estimator.predict(x_test))}
    found |= {"fit_seconds": fitted - begin, "predict_seconds": time.process_time() - fitted}
    if name in NUMBERS and method == NETWORK:
        draws = estimator.sample_y(x_test, 1000)
        low, high = np.quantile(draws, [0.05, 0.95], axis=-1)
        found["coverage"] = float(((low < y_test) & (y_test < high)).mean())
    return found


def make(name: str, seed: int, method: str, epochs: int | None) -> Any:
    """Return an estimator; on Adult, in a pipeline that encodes the categories."""
    encoder: Any = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    if method == NETWORK:
        kind = BayesianClassifier if name in CLASSES else BayesianRegressor
        estimator: Any = kind(random_state=seed, epochs=epochs)
    elif method in (PLAIN, STOPPED):
        kind = MLPClassifier if name in CLASSES else MLPRegressor
        most = 200 if epochs is None else epochs
        stopped = method == STOPPED
        mlp = kind(hidden_layer_sizes=(HIDDEN,), random_state=seed, max_iter=most, early_stopping=stopped)
        estimator = make_pipeline(StandardScaler(), mlp)
        if name in NUMBERS:
            estimator = TransformedTargetRegressor(estimator, transformer=StandardScaler())
    else:
        kind = HistGradientBoostingClassifier if name in CLASSES else HistGradientBoostingRegressor
        # Encoded categories come first.
        categories = range(len(CATEGORIES)) if name == "adult" else None
        estimator = kind(random_state=seed, categorical_features=categories)
        encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    if name != "adult":
        return estimator
    return make_pipeline(make_column_transformer((encoder, CATEGORIES), remainder="passthrough"), estimator)


def split(data_dir: Path, name: str, seed: int) -> tuple[Table, Table]:
    """Return the training rows and the test rows."""
    if name == "adult":
        return adult(data_dir, "data"), adult(data_dir, "test")
    x, y = numbers(data_dir, name)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=seed)
    return (x, y), (x_test, y_test)


def numbers(data_dir: Path, name: str) -> Table:
    """Return a set without categories."""
    if name == "concrete":
        with np.load(data_dir / "uci" / "concrete.npz") as file:
            return file["data"][:, file["feature_columns"]], file["data"][:, file["target_column"]]
    load = {
        "breast cancer": datasets.load_breast_cancer,
        "digits": datasets.load_digits,
        "diabetes": datasets.load_diabetes,
    }
    return load[name](return_X_y=True)


def measure_of(name: str) -> str:
    return "log_loss" if name in CLASSES else "rmse"


def winner(results: Results, name: str) -> str:
    """Return which of network and trees has a loss that is lower by two standard errors of the paired difference."""
    network, trees = (results.values(measure_of(name), data=name, method=method) for method in (NETWORK, TREES))
    if is_below(paired(network, trees)):
        return NETWORK
    return TREES if is_below(paired(trees, network)) else "neither"


def claims(results: Results) -> list[Claim]:
    """Count the sets that each method wins."""
    names, seeds = results.distinct("data"), str(len(results.distinct("seed")))
    won = [name for name in names if winner(results, name) == NETWORK]
    text = "Tables: the network has a lower loss than gradient boosting on most sets, by two standard errors"
    shown = f"{len(won)} of {len(names)} ({', '.join(won) or 'none'})"
    return [Claim(text, "", shown, seeds, len(won) > len(names) / 2)]


def report(results: Results) -> str:
    """Report losses, accuracy, coverage and the CPU's seconds on every set."""
    losses, others, seconds = [], [], []
    for name in results.distinct("data"):
        measure = measure_of(name)
        digits = 3 if name in CLASSES else 2
        loss, time_line = [f"{name}, {TITLES[measure]}"], [name]
        for method in METHODS:
            rows = results.where(data=name, method=method)
            loss.append(with_error([row[measure] for row in rows], digits) if rows else "")
            time_line.append(f"{np.mean([row['fit_seconds'] for row in rows]):.1f}" if rows else "")
        losses.append([*loss, winner(results, name)])
        seconds.append(time_line)
        for extra in ("accuracy", "coverage"):
            line = [f"{name}, {extra}"]
            for method in METHODS:
                values = [row[extra] for row in results.where(data=name, method=method) if extra in row]
                line.append(f"{np.mean(values):.3f}" if values else "")
            if any(line[1:]):
                others.append(line)
    return f"""### Tables

`BayesianClassifier` and `BayesianRegressor` at their defaults, beside scikit-learn's \
`MLPClassifier` and `MLPRegressor` of as many units, without and with early stopping, and \
`HistGradientBoostingClassifier` and `HistGradientBoostingRegressor` at theirs, on \
{len(results.distinct("seed"))} seeds. Losses are means and standard errors on \
test rows; the winner, network or trees, is ahead by two standard errors of the paired difference. Coverage \
is the share of targets inside 90 % intervals (`python -m benchmarks.uncertainty.tables --data-dir DIR`).

{markdown_table(["", *METHODS, "winner"], losses)}

{markdown_table(["", *METHODS], others)}

CPU seconds to fit, on one thread of a shared CPU:

{markdown_table(["", *METHODS], seconds)}"""


if __name__ == "__main__":
    main(run, report)
