# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Estimators for tables: scikit-learn's own checks, weights, units, columns, bad input, and its tools."""

import copy
import importlib
import pickle
import random
import sys
from contextlib import nullcontext
from decimal import Decimal
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from joblib import parallel_config
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import pyro_radial.sklearn as estimators
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial._columns import Columns
from pyro_radial.nn import likelihoods
from pyro_radial.nn.supervised import WeightedRows
from pyro_radial.sklearn import BayesianClassifier, BayesianRegressor

ADAM = partial(torch.optim.Adam, lr=0.1)
FAST = {"optim": ADAM, "epochs": 6, "num_samples": 8, "random_state": 0}
X = np.array([[0.0, 1.0], [1.0, 3.0], [2.0, -1.0], [3.0, 0.5], [4.0, 2.0], [5.0, 0.0]])
LABELS = np.array(["a", "b", "a", "b", "c", "c"])
NUMBERS = X @ np.array([10.0, -3.0]) + 200.0


@parametrize_with_checks([BayesianClassifier(**FAST), BayesianRegressor(**FAST)])
def test_checks_of_scikit_learn(estimator, check):
    """All pass, so none is named as an expected failure."""
    check(estimator)


def weighted_loss(x, y, weights, likelihood, outputs):
    """The ELBO's loss at one draw of the guide."""
    pyro.set_rng_seed(3)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    model = WeightedRows(SupervisedModel(BayesianModule(net), likelihood.double()))
    guide = AutoRadial(model)
    args = torch.as_tensor(x), (torch.as_tensor(y), torch.as_tensor(weights))
    guide.setup(*args)
    pyro.set_rng_seed(4)
    loss, terms = TermsELBO().loss_and_terms(model, guide, args, {}, 1.0, 0)
    return loss.item(), terms.negative_log_likelihood.item(), terms.kl.item()


@pytest.mark.parametrize(
    ("likelihood", "y", "outputs"),
    [
        (likelihoods.Categorical, np.array([0, 1, 0, 1, 2, 2]), 3),
        (partial(likelihoods.Gaussian, learn_scale=True), NUMBERS[:, None] / 100, 1),
    ],
)
def test_a_row_of_weight_two_counts_like_two_equal_rows_in_the_elbo(likelihood, y, outputs):
    weights = np.array([2.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    rows = np.repeat(np.arange(6), weights.astype(int))
    weighted = weighted_loss(X, y, weights, likelihood(), outputs)
    repeated = weighted_loss(X[rows], y[rows], np.ones(len(rows)), likelihood(), outputs)
    assert weighted == pytest.approx(repeated, rel=1e-12)
    assert weighted[1] != pytest.approx(weighted_loss(X, y, np.ones(6), likelihood(), outputs)[1], rel=1e-3)


@pytest.mark.parametrize(("kind", "y"), [(BayesianClassifier, LABELS), (BayesianRegressor, NUMBERS)])
def test_weights_count_rows_in_all_that_a_fit_learns(kind, y):
    weights = np.array([2, 1, 3, 1, 0, 1])
    rows = np.repeat(np.arange(6), weights)
    weighted = kind(**FAST).fit(X, y, sample_weight=weights)
    repeated = kind(**FAST).fit(X[rows], y[rows])
    read = "predict_proba" if kind is BayesianClassifier else "predict"
    np.testing.assert_allclose(getattr(weighted, read)(X), getattr(repeated, read)(X), rtol=1e-6)


def test_a_class_weight_multiplies_the_weights_of_its_rows():
    by_class = BayesianClassifier(class_weight={"a": 2.0, "c": 0.5}, **FAST).fit(X, LABELS)
    by_row = BayesianClassifier(**FAST).fit(X, LABELS, sample_weight=[2.0, 1.0, 2.0, 1.0, 0.5, 0.5])
    np.testing.assert_array_equal(by_class.predict_proba(X), by_row.predict_proba(X))


def test_balanced_weights_are_equal_in_sum():
    balanced = BayesianClassifier(class_weight="balanced", **FAST).fit(X[:5], LABELS[:5])
    by_row = BayesianClassifier(**FAST).fit(X[:5], LABELS[:5], sample_weight=[5 / 6] * 4 + [5 / 3])
    np.testing.assert_allclose(balanced.predict_proba(X), by_row.predict_proba(X), rtol=1e-6)


def test_units_of_inputs_and_targets_do_not_matter():
    first = BayesianRegressor(**FAST).fit(X, NUMBERS)
    other = BayesianRegressor(**FAST).fit(1e4 * X - 7.0, 1e-3 * NUMBERS + 5.0)
    mean, std = first.predict(X, return_std=True)
    other_mean, other_std = other.predict(1e4 * X - 7.0, return_std=True)
    np.testing.assert_allclose(other_mean, 1e-3 * mean + 5.0, rtol=1e-6)
    np.testing.assert_allclose(other_std, 1e-3 * std, rtol=1e-6)


def test_a_linear_network_has_the_mean_and_deviation_of_conjugate_regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    y = 50.0 + x @ np.array([20.0, -10.0]) + 10.0 * rng.normal(size=200)
    network = nn.Linear(2, 1).double()
    settings = {"optim": partial(torch.optim.Adam, lr=0.05), "epochs": 100, "batch_size": 200, "num_samples": 1000}
    regressor = BayesianRegressor(network, prior=dist.Normal(0.0, 1.0), random_state=0, **settings).fit(x, y)
    columns = np.column_stack([x, np.ones(200)])
    coefficients, squares = np.linalg.lstsq(columns, y)[:2]
    residual = (squares[0] / 200) ** 0.5
    # With 200 rows the prior moves the mean by less than a hundredth, and weights add 3 / 200 of the noise's variance.
    mean, std = regressor.predict(x, return_std=True)
    np.testing.assert_allclose(mean, columns @ coefficients, atol=1.5)
    np.testing.assert_allclose(std, residual, rtol=0.06)


def test_samples_have_the_predictive_distribution():
    regressor = BayesianRegressor(**FAST | {"num_samples": 200}).fit(X, NUMBERS)
    mean, std = regressor.predict(X, return_std=True)
    draws = regressor.sample_y(X, 200, random_state=1)
    assert draws.shape == (6, 200)
    np.testing.assert_allclose(draws.mean(1), mean, atol=5 * std.max() / 100**0.5)
    np.testing.assert_allclose(draws.std(1), std, rtol=0.2)
    np.testing.assert_array_equal(draws, regressor.sample_y(X, 200, random_state=1))
    assert (draws != regressor.sample_y(X, 200, random_state=2)).all()


def test_several_targets_keep_their_shape():
    regressor = BayesianRegressor(**FAST).fit(X, np.stack([NUMBERS, -NUMBERS], 1))
    mean, std = regressor.predict(X, return_std=True)
    assert mean.shape == std.shape == (6, 2)
    assert regressor.sample_y(X, 3).shape == (6, 2, 3)


def test_any_network_or_a_function_that_makes_one():
    network = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    before = copy.deepcopy(network.state_dict())
    classifier = BayesianClassifier(network, **FAST).fit(X, LABELS)
    assert classifier.predict_proba(X).shape == (6, 3)
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    made = []

    def make(features, outputs):
        made.append((features, outputs))
        return nn.Linear(features, outputs)

    BayesianClassifier(make, **FAST).fit(X, LABELS)
    BayesianRegressor(make, **FAST).fit(X, NUMBERS)
    assert made == [(2, 3), (2, 1)]


def test_a_fit_changes_no_global_random_numbers():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    BayesianRegressor(**FAST).fit(X, NUMBERS).sample_y(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]


def test_missing_numbers_become_the_mean_and_are_told():
    missing = X.copy()
    missing[0, 1] = np.nan
    regressor = BayesianRegressor(**FAST).fit(missing, NUMBERS)
    transformed = regressor.columns_.transform(missing)
    np.testing.assert_array_equal(transformed[:, 2], [1, 0, 0, 0, 0, 0])
    assert transformed[0, 1] == 0.0
    np.testing.assert_allclose(np.nanmean(transformed[1:, :2], 0)[1], 0.0, atol=1e-12)
    # A column that is missing in no row of the training may be so later.
    assert np.isfinite(regressor.predict([[np.nan, 1.0]])).all()


def table():
    pandas = pytest.importorskip("pandas")
    columns = {
        "size": [1.0, 2.0, np.nan, 4.0, 5.0, 6.0],
        "city": ["Bonn", "Oslo", None, "Oslo", "Bonn", "Bonn"],
        "rooms": pandas.array([1, None, 3, 1, 2, 2], dtype="Int64"),
        "kind": pandas.Categorical([7, 8, 7, 7, 8, 8]),
        "new": [True, False, True, False, True, False],
    }
    return pandas.DataFrame(columns)


def test_columns_of_zeros_and_ones_keep_their_unit():
    """Over its deviation of 0.14, a category of one row in fifty would be a 7."""
    x = np.zeros((50, 3))
    x[7, 0] = 1.0
    x[:, 1] = np.arange(50)
    x[:, 2] = [0.0, np.nan] * 25
    columns = BayesianRegressor(**FAST).fit(x, x[:, 1]).columns_.transform(x)
    assert columns[7, 0] == pytest.approx(0.98)
    assert columns[8, 0] == pytest.approx(-0.02)
    assert columns[:, 1].std() == pytest.approx(1.0)
    assert (columns[:, 2] == 0.0).all()


def test_a_table_has_numbers_and_categories():
    data = table()
    regressor = BayesianRegressor(**FAST).fit(data, NUMBERS)
    assert regressor.feature_names_in_.tolist() == ["size", "city", "rooms", "kind", "new"]
    # Three numbers, three cities with the missing one, two kinds, and two columns that tell what is missing.
    assert regressor.columns_.transform(data).shape == (6, 10)
    np.testing.assert_allclose(regressor.columns_.transform(data)[:, :8].mean(0), 0.0, atol=1e-12)
    assert pickle.loads(pickle.dumps(regressor)).predict(data).shape == (6,)


@pytest.mark.parametrize("names", [[0, 1], [20, 10], [("a", 1), ("a", 2)]])
def test_columns_in_another_order_are_refused_whatever_their_names_are(names):
    data = pytest.importorskip("pandas").DataFrame(X, columns=names)
    of_table, of_array = (BayesianRegressor(**FAST).fit(x, NUMBERS) for x in (data, X))
    np.testing.assert_array_equal(of_table.predict(data), of_array.predict(data))
    with pytest.raises(ValueError, match="X must have the columns of the training in their order"):
        of_table.predict(data[names[::-1]])
    if names == [0, 1]:
        with pytest.raises(ValueError, match=r"in their order, \[0, 1\], got \[1, 0\]"):
            of_array.predict(data[names[::-1]])


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_a_table_is_read_alike_in_all_its_forms():
    data = table()
    nullable = data.convert_dtypes()
    regressor = BayesianRegressor(**FAST).fit(nullable, NUMBERS)
    expected = BayesianRegressor(**FAST).fit(data, NUMBERS).predict(data)
    for rows in (
        data,
        nullable,
        data.astype(object),
        data.to_numpy(),
        nullable.to_numpy(),
        data.astype({"kind": float}),
    ):
        np.testing.assert_array_equal(regressor.predict(rows), expected)


def test_numbers_in_a_column_of_objects_are_numbers():
    pandas = pytest.importorskip("pandas")
    expected = Columns().fit(np.array([[1.5], [np.nan], [3.0]]), np.ones(3))._encode(np.array([[2.0]]))
    for values in ([1.5, None, 3], [1.5, pandas.NA, 3.0], [Decimal("1.5"), None, Decimal(3)]):
        data = pandas.DataFrame({"a": pandas.Series(values, dtype=object)})
        columns = Columns().fit(data, np.ones(3))
        np.testing.assert_array_equal(columns._encode(pandas.DataFrame({"a": [2.0]})), expected)


NUMERALS = [str(number / 7) for number in range(60)]


@pytest.mark.parametrize(
    ("texts", "is_warned"),
    [
        (NUMERALS, True),
        ([text.replace(".", ",") for text in NUMERALS], True),
        ([f"${text}" for text in NUMERALS], True),
        ([f"{number} kg" for number in range(12)] * 5, True),
        ([f"row {number}" for number in range(60)], True),
        ([f"town {number}" for number in range(12)] * 5, False),
        ([str(number) for number in range(10)] * 6, False),
        (["Bonn", "Oslo", None], False),
    ],
    ids=["numbers", "decimal commas", "prices", "units", "names of rows", "towns", "digits", "two towns"],
)
def test_text_that_hardly_stands_for_categories_is_warned_of(texts, is_warned):
    data = pytest.importorskip("pandas").DataFrame({"a": texts})
    expected = (
        pytest.warns(UserWarning, match="column 'a' is text with .* pandas.to_numeric") if is_warned else nullcontext()
    )
    with expected:
        Columns().fit(data, np.ones(len(data)))
    Columns().fit(data.astype("category"), np.ones(len(data)))


def test_a_category_that_training_did_not_have_is_told_by_column():
    data = table()
    classifier = BayesianClassifier(**FAST).fit(data, LABELS)
    unseen = data.assign(city="Rome")
    with pytest.warns(UserWarning, match=r"column 'city' has categories that training did not have, \['Rome'\]"):
        probabilities = classifier.predict_proba(unseen)
    with pytest.warns(UserWarning, match="'Paris'"):
        other = classifier.predict_proba(data.assign(city="Paris"))
    np.testing.assert_array_equal(probabilities, other)
    with pytest.warns(UserWarning, match=r"column 'kind' has categories .*, \['\(missing\)'\]"):
        classifier.predict(data.assign(kind=None))


def test_faults_of_a_table_name_the_column():
    data = table()
    with pytest.raises(ValueError, match="column 'city' must have a value, got none in 6 rows"):
        BayesianRegressor(**FAST).fit(data.assign(city=None), NUMBERS)
    with pytest.raises(ValueError, match=r"column 'size' must hold finite numbers: .*infinity"):
        BayesianRegressor(**FAST).fit(data.assign(size=np.inf), NUMBERS)
    with pytest.raises(ValueError, match="column 'new' must hold numbers or categories, got datetime64"):
        BayesianRegressor(**FAST).fit(data.assign(new=np.array(["2020-01-01"] * 6, dtype="datetime64[s]")), NUMBERS)
    with pytest.raises(ValueError, match="column 'new' must hold numbers or categories, got object of kind 'mixed"):
        BayesianRegressor(**FAST).fit(data.assign(new=[1, "a"] * 3), NUMBERS)
    regressor = BayesianRegressor(**FAST).fit(data, NUMBERS)
    with pytest.raises(ValueError, match=r"column 'size' must hold finite numbers.*'large'"):
        regressor.predict(data.assign(size="large"))
    with pytest.raises(ValueError, match="feature names"):
        regressor.predict(data.rename(columns={"size": "length"}))


def with_column(values):
    changed = X.astype(object)
    changed[:, 1] = values
    return changed


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (with_column(["u", "v"] * 3), "column 1 must hold finite numbers; a DataFrame takes categories too.*'u'"),
        (with_column(np.nan), "column 1 must have a value, got none in 6 rows"),
        (with_column(np.inf), "column 1 must hold finite numbers.*infinity"),
    ],
)
def test_faults_of_an_array_name_the_column(x, message):
    for estimator, y in ((BayesianClassifier(**FAST), LABELS), (BayesianRegressor(**FAST), NUMBERS)):
        with pytest.raises(ValueError, match=message):
            estimator.fit(x, y)


@pytest.mark.parametrize(
    ("changes", "y", "message"),
    [
        ({}, ["a"] * 6, "y must hold two classes or more, got one class, 'a'"),
        ({}, [0.0, 1.0, 0.0, 1.0, 1.0, np.nan], "y contains NaN"),
        ({}, NUMBERS / 7, "Unknown label type: continuous"),
        ({"class_weight": {"a": 1.0, "z": 2.0}}, LABELS, r"classes, \['b', 'c'\], are not in class_weight"),
        ({"class_weight": {"a": -1.0}}, LABELS, "class_weight must be positive"),
        ({"class_weight": "even"}, LABELS, "'class_weight' parameter .* must be"),
        ({"network": nn.Linear(2, 5)}, LABELS, r"network must return \(2, 3\) numbers, .*got \(2, 5\)"),
        ({"network": nn.Linear(7, 3)}, LABELS, "the network of bnn, .* failed"),
        ({"epochs": 0}, LABELS, "epochs must be a positive integer, got 0"),
        ({"random_state": "x"}, LABELS, "random_state must be a seed, got 'x'"),
    ],
)
def test_faults_of_a_classifier_are_named(changes, y, message):
    with pytest.raises(ValueError, match=message):
        BayesianClassifier(**FAST | changes).fit(X, y)


def test_faults_of_a_regressor_are_named():
    with pytest.raises(ValueError, match="y contains NaN"):
        BayesianRegressor(**FAST).fit(X, np.where(NUMBERS > 210, np.nan, NUMBERS))
    with pytest.raises(ValueError, match="sample_weight must be at least zero, and positive for some rows"):
        BayesianRegressor(**FAST).fit(X, NUMBERS, sample_weight=[1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    # Newer versions of scikit-learn find this themselves.
    with pytest.raises(ValueError, match=r"non-zero|sample_weight must be at least zero"):
        BayesianRegressor(**FAST).fit(X, NUMBERS, sample_weight=np.zeros(6))
    with pytest.raises(NotFittedError):
        BayesianRegressor().sample_y(X)


@pytest.mark.parametrize("y", [["a", "b"] * 10, np.array(["1.5", "high"] * 10, dtype=object)])
def test_a_regressor_of_labels_names_y(y):
    with pytest.raises(ValueError, match=r"y must hold numbers, not labels: .*; BayesianClassifier takes classes"):
        BayesianRegressor(epochs=1).fit(np.ones((20, 2)), y)


def test_tools_of_scikit_learn_take_the_estimators():
    x, y = load_wine(return_X_y=True)
    # Forked processes need not import torch.
    with parallel_config("multiprocessing"):
        scores = cross_val_score(BayesianClassifier(**FAST), x, y, cv=3, n_jobs=2)
    assert scores.min() > 0.9
    pipeline = make_pipeline(PolynomialFeatures(include_bias=False), BayesianRegressor(**FAST))
    x, y = load_diabetes(return_X_y=True)
    grid = GridSearchCV(pipeline, {"bayesianregressor__epochs": [1, 6]}, cv=2).fit(x[:200, :4], y[:200])
    assert grid.best_params_ == {"bayesianregressor__epochs": 6}


def test_copies_predict_alike():
    classifier = BayesianClassifier(network=nn.Linear(2, 3), **FAST).fit(X, LABELS)
    for other in (pickle.loads(pickle.dumps(classifier)), copy.deepcopy(classifier), clone(classifier).fit(X, LABELS)):
        np.testing.assert_array_equal(other.predict_proba(X), classifier.predict_proba(X))


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "pyro_radial.sklearn")
    with pytest.raises(ImportError, match=r"scikit-learn: .*pyro-radial\[sklearn\]"):
        importlib.import_module("pyro_radial.sklearn")


def test_compiled_steps_end_where_others_do(monkeypatch):
    x, y = load_diabetes(return_X_y=True)
    predictions = []
    for steps in (1, 10**9):
        monkeypatch.setattr(estimators, "STEPS_TO_COMPILE", steps)
        regressor = BayesianRegressor(epochs=6, random_state=0).fit(x[:128], y[:128])
        predictions.append(regressor.predict(x[128:]))
    # In float64 compilers change the last digits.
    assert np.allclose(*predictions, rtol=1e-8)
