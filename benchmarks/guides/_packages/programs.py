# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What packages give to Pyro's ``SVI`` when they train on made-up data.

Each package builds its own model, guide, loss, optimizer and batches. We only let ``SVI.step`` note its arguments
instead of taking a step, so no package's code is copied or changed.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceEnum_ELBO

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: Epochs over which scvi-tools raises the weight of the KL by default.
WARMUP_EPOCHS = 400


class NotedError(BaseException):
    """Ends a package's training: enough steps are noted. Packages that catch every ``Exception`` do not catch it."""


class Noted(NamedTuple):
    """What a package gave to ``SVI``, and the arguments of its first steps."""

    svi: SVI
    batches: list[Arguments]

    @property
    def loss(self) -> ELBO:
        """The ELBO; ``SVI`` keeps its methods."""
        elbo: ELBO = self.svi.loss.__self__
        return elbo


@dataclass(frozen=True)
class Subject:
    """A package's program.

    :param distribution: the package's name on PyPI.
    :param data: what the data are like, for the table.
    :param make: a function of "whether in the smallest form" that trains with ``SVI.step`` noted.
    :param repeats: how many times each block of steps is timed.
    :param seeds: how many seeds train it when parameters are compared.
    :param whole: the steps of a whole run; 0 for a program whose whole runs are not timed.
    """

    distribution: str
    data: str
    make: Callable[[bool], Noted]
    repeats: int = 8
    seeds: int = 3
    whole: int = 0


@contextmanager
def noted(steps: int, *, taken: int = 0) -> Iterator[list[Noted]]:
    """Let ``SVI.step`` note its arguments in the block, which ends after so many.

    :param steps: how many steps to note.
    :param taken: how many steps are taken as usual before, for packages that register hooks after a first step.
    """
    found: list[Noted] = []
    usual = SVI.step
    left = taken

    def step(self: SVI, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            return usual(self, *args, **kwargs)
        if not found or found[-1].svi is not self:
            found.append(Noted(self, []))
        found[-1].batches.append((args, kwargs))
        if len(found[-1].batches) == steps:
            raise NotedError
        return 1.0

    SVI.step = step  # type: ignore[method-assign]
    try:
        yield found
    except NotedError:
        pass
    finally:
        SVI.step = usual  # type: ignore[method-assign]


def kl_weight_at(step: int, batches: int) -> float:
    """The weight that scvi-tools' training plans pass in a step."""
    return float(max(1e-6, min(1.0, (step // batches) / WARMUP_EPOCHS)))


def arguments_at(noted: Noted, step: int) -> Arguments:
    """The arguments of a step: batches in turn, and the weight of the KL of its epoch."""
    args, kwargs = noted.batches[step % len(noted.batches)]
    if "kl_weight" in kwargs:
        kwargs = kwargs | {"kl_weight": kl_weight_at(step, len(noted.batches))}
    return args, kwargs


def counts(rows: int, genes: int, types: int, seed: int = 0) -> tuple[Any, Any]:
    """Counts of genes, and the expected counts of each type of cell."""
    rng = np.random.default_rng(seed)
    signatures = rng.gamma(0.5, 2.0, size=(types, genes)) + 0.01
    shares = rng.dirichlet(np.full(types, 0.3), size=rows)
    return rng.poisson(10.0 * shares @ signatures).astype(np.float32), signatures


def annotated(rows: int, genes: int, types: int) -> Any:
    """The counts of cells as AnnData; scvi-tools then draws the same batches."""
    import scvi

    scvi.settings.seed = 0
    return annotated_alone(rows, genes, types)


def annotated_alone(rows: int, genes: int, types: int) -> Any:
    """The counts of cells with a type, a batch and a place each, as AnnData."""
    import anndata

    values, _ = counts(rows, genes, types)
    rng = np.random.default_rng(1)
    data = anndata.AnnData(values)
    data.var_names = [f"gene{number}" for number in range(genes)]
    data.obs_names = [f"cell{number}" for number in range(rows)]
    data.obs["type"] = [f"type{number % types}" for number in range(rows)]
    data.obs["batch"] = [f"batch{number % 2}" for number in range(rows)]
    data.obsm["X_spatial"] = rng.uniform(size=(rows, 2))
    return data


def give_deep_getattr() -> None:
    """Let Pyro have a helper that cell2location 0.1.5 imports and Pyro 1.9.2 no longer has."""
    from pyro.infer.autoguide import utils

    if not hasattr(utils, "deep_getattr"):
        utils.deep_getattr = lambda holder, path: attrgetter(path)(holder)


def give_make_grid() -> None:
    """Let pyroVED import a function of torchvision, which only its plots call, where there is no torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        utils: Any = ModuleType("torchvision.utils")
        utils.make_grid = None
        sys.modules |= {"torchvision": ModuleType("torchvision"), "torchvision.utils": utils}


def give_inf() -> None:
    """Let scTM 0.1.3 have a name that NumPy 2 no longer has."""
    if not hasattr(np, "Inf"):
        setattr(np, "Inf", np.inf)  # noqa: B010


def give_keyword() -> None:
    """Let pybasilica 0.4.0 name the argument of a function whose argument has no name since torch 2.1."""
    usual = torch.set_default_tensor_type
    torch.set_default_tensor_type = lambda t: usual(t)


QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}


def cell2location(rows: int, genes: int, types: int) -> Noted:
    """Cell2location with its defaults: all locations in each step."""
    import pandas as pd

    give_deep_getattr()
    from cell2location.models import Cell2location

    data = annotated(rows, genes, types)
    _, signatures = counts(rows, genes, types)
    names = [f"type{number}" for number in range(types)]
    states = pd.DataFrame(signatures.T, index=data.var_names, columns=names)
    Cell2location.setup_anndata(data, batch_key="batch")
    model = Cell2location(data, cell_state_df=states, N_cells_per_location=8, detection_alpha=20.0)
    with noted(1) as found:
        model.train(max_epochs=2, batch_size=None, train_size=1.0, accelerator="cpu", enable_progress_bar=False)
    return found[-1]


def regression_model(small: bool) -> Noted:
    """cell2location's RegressionModel, which estimates the signatures of types from single cells, in mini-batches."""
    give_deep_getattr()
    from cell2location.models import RegressionModel

    rows, genes = (60, 20) if small else (2_000, 500)
    data = annotated(rows, genes, 8)
    RegressionModel.setup_anndata(data, batch_key="batch", labels_key="type")
    model = RegressionModel(data)
    with noted(8) as found:
        model.train(max_epochs=8, batch_size=rows // 8, train_size=1.0, accelerator="cpu", enable_progress_bar=False)
    return found[-1]


def amortized_lda(small: bool) -> Noted:
    """scvi-tools' latent Dirichlet allocation with encoders."""
    from scvi.model import AmortizedLDA

    rows, genes = (64, 20) if small else (1_024, 500)
    data = annotated(rows, genes, 8)
    AmortizedLDA.setup_anndata(data)
    model = AmortizedLDA(data, n_topics=10)
    with noted(4) as found:
        model.train(max_epochs=4, batch_size=rows // 4, train_size=1.0, **QUIET)
    return found[-1]


def resolvi(small: bool) -> Noted:
    """scvi-tools' RESOLVI for spatial transcriptomics."""
    from scvi.external import RESOLVI

    rows, genes = (64, 20) if small else (1_024, 200)
    data = annotated(rows, genes, 8)
    data.layers["counts"] = data.X.copy()
    RESOLVI.setup_anndata(data, layer="counts", batch_key="batch", prepare_data_kwargs={"spatial_rep": "X_spatial"})
    model = RESOLVI(data)
    with noted(4) as found:
        model.train(max_epochs=4, batch_size=rows // 4, train_size=1.0, **QUIET)
    return found[-1]


def decipher(small: bool) -> Noted:
    """scvi-tools' Decipher, two levels of latent variables with networks between them."""
    from scvi.external import Decipher

    rows, genes = (64, 20) if small else (1_024, 500)
    data = annotated(rows, genes, 8)
    Decipher.setup_anndata(data)
    model = Decipher(data)
    with noted(4) as found:
        model.train(max_epochs=4, batch_size=rows // 4, train_size=1.0, **QUIET)
    return found[-1]


def mofaflex(small: bool) -> Noted:
    """MOFA-FLEX: factors shared by two views, one of them with missing values."""
    import anndata
    import mofaflex
    import mudata

    rows, genes = (40, 12) if small else (500, 200)
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(rows, 5))
    views = {}
    for name, features in (("rna", genes), ("protein", genes // 4)):
        values = factors @ rng.normal(size=(5, features)) + 0.5 * rng.normal(size=(rows, features))
        if name == "protein":
            values[rng.random(values.shape) < 0.1] = np.nan
        views[name] = anndata.AnnData(values.astype(np.float32))
        views[name].obs_names = [f"cell{number}" for number in range(rows)]
        views[name].var_names = [f"{name}{number}" for number in range(features)]
    with noted(1) as found:
        mofaflex.MOFAFLEX(
            mudata.MuData(views),
            mofaflex.DataOptions(plot_data_overview=False),
            mofaflex.ModelOptions(n_factors=5, weight_prior="Horseshoe", likelihoods="Normal"),
            mofaflex.TrainingOptions(device="cpu", max_epochs=2_000, seed=0, save_path=False),
        )
    return found[-1]


def py_irt(small: bool) -> Noted:
    """py-irt's two-parameter model with hierarchical priors."""
    from py_irt.models.two_param_logistic import TwoParamLog

    people, items = (20, 5) if small else (200, 50)
    rng = np.random.default_rng(0)
    person, item = (part.ravel() for part in np.meshgrid(np.arange(people), np.arange(items), indexing="ij"))
    logits = rng.normal(size=people)[person] - rng.normal(size=items)[item]
    answers = (rng.random(len(logits)) < 1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    model = TwoParamLog("hierarchical", "cpu", items, people)
    with noted(1) as found:
        model.fit(torch.tensor(person), torch.tensor(item), torch.tensor(answers), 2)
    return found[-1]


def ipolng(small: bool) -> Noted:
    """iPoLNG: topics that two kinds of measurements of a cell share, in the part with both."""
    from iPoLNG.iPoLNG import iPoLNG_helper

    rows, genes = (20, 12) if small else (300, 200)
    values = {f"W{number}": torch.tensor(counts(rows, genes, 5, number)[0]) for number in (1, 2)}
    helper = iPoLNG_helper(5, alpha0s=[1.0, 2.0])
    svi = SVI(helper.model, helper.guide, pyro.optim.Adam({"lr": 0.01}), pyro.infer.TraceMeanField_ELBO())
    return Noted(svi, [((values,), {})])


def pyroved(small: bool, invariances: list[str] | None = None) -> Noted:
    """PyroVED's variational autoencoder, perhaps one that is invariant to rotations."""
    give_make_grid()
    from pyroved.models import iVAE
    from pyroved.trainers import SVItrainer

    size = 8 if small else 28
    images = torch.rand(400, size, size, generator=torch.Generator().manual_seed(0))
    trainer = SVItrainer(iVAE((size, size), latent_dim=2, invariances=invariances), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=100)
    with noted(4) as found:
        trainer.step(loader, scale_factor=1.5)
    return found[-1]


def gpytorch(small: bool) -> Noted:
    """A sparse Gaussian process of GPyTorch with its Pyro interface."""
    from gpytorch import distributions, kernels, likelihoods, means, models, variational

    rows, inducing = (40, 5) if small else (500, 32)

    class Process(models.PyroGP):
        def __init__(self) -> None:
            points = torch.linspace(0.0, 1.0, inducing)[:, None]
            family = variational.CholeskyVariationalDistribution(inducing)
            strategy = variational.VariationalStrategy(self, points, family)
            super().__init__(strategy, likelihoods.GaussianLikelihood(), num_data=rows)
            self.mean_module = means.ConstantMean()
            self.covar_module = kernels.ScaleKernel(kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0.0, 1.0, rows)[:, None]
    y = torch.sin(6.0 * x[:, 0])
    model = Process()
    svi = SVI(model.model, model.guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO(retain_graph=True))
    return Noted(svi, [((x, y), {})])


def pylineagt(small: bool) -> Noted:
    """pylineaGT: a mixture of normal distributions of coverage, with an enumerated component and hooks on gradients."""
    from pylineaGT.mvnmm import MVNMixtureModel

    rows = 40 if small else 500
    rng = np.random.default_rng(0)
    values = rng.poisson(rng.gamma(2.0, 30.0, size=(4, 3))[rng.integers(4, size=rows)] + 5.0)
    model = MVNMixtureModel(4, torch.tensor(values), columns=["early", "mid", "late"], lineages=["T"])
    with noted(1, taken=1) as found:
        model.fit(steps=10, seed_optim=False, seed=5, show_progr=False)
    return found[-1]


def cellbender(small: bool) -> Noted:
    """CellBender's full model: cells, empty droplets and swapped barcodes, with an enumerated indicator."""
    from cellbender.remove_background.model import RemoveBackgroundPyroModel
    from cellbender.remove_background.vae.decoder import Decoder
    from cellbender.remove_background.vae.encoder import CompositeEncoder, EncodeNonZLatents, EncodeZ

    droplets, genes = (64, 20) if small else (1_000, 200)
    values = torch.tensor(counts(droplets, genes, 5)[0])
    values[droplets // 2 :] = torch.poisson(torch.full((droplets - droplets // 2, genes), 0.3))
    totals = values.sum(-1)
    cells, empty = float(totals[: droplets // 2].mean()), float(totals[droplets // 2 :].mean())
    crossover = float(np.log((cells * empty) ** 0.5))
    ambient = values.mean(0) / values.mean(0).sum()
    priors = {
        "d_std": 0.2, "cell_counts": cells, "empty_counts": empty, "d_empty_std": 0.2, "cell_logit": 0.0,
        "chi_ambient": ambient, "chi_bar": ambient,
    }  # fmt: skip
    encoders = CompositeEncoder(
        {
            "z": EncodeZ(genes, [64, 64], 10, use_batch_norm=False, use_layer_norm=False, input_transform="normalize"),
            "other": EncodeNonZLatents(
                n_genes=genes,
                z_dim=10,
                log_count_crossover=crossover,
                prior_log_cell_counts=np.log1p(cells),
                empty_log_count_threshold=np.log1p(empty),
                prior_logit_cell_prob=0.0,
                input_transform="log_normalize",
            ),
        }
    )
    decoder = Decoder(10, hidden_dims=[64], use_batch_norm=True, use_layer_norm=False, output_dim=genes)
    names = np.array([f"gene{number}" for number in range(genes)])
    model = RemoveBackgroundPyroModel(
        "full", encoders, decoder, priors, genes, droplets, names, int(empty), crossover, use_cuda=False
    )
    pyro.enable_validation(False)
    loss = TraceEnum_ELBO(max_plate_nesting=1, strict_enumeration_warning=False)
    svi = SVI(model.model, model.guide, pyro.optim.ClippedAdam({"lr": 1e-4}), loss)
    order = torch.randperm(droplets, generator=torch.Generator().manual_seed(0))
    return Noted(svi, [((batch,), {}) for batch in values[order].chunk(4)])


def cellarium(small: bool, name: str) -> Noted:
    """A model of cellarium-ml with its ELBO; its Lightning module has the optimizer that Lightning would give it to."""
    from cellarium.ml import CellariumModule
    from cellarium.ml.models import LogisticRegression, ProbabilisticPCA

    rows, genes, types = (64, 20, 3) if small else (1_024, 500, 8)
    values, _ = counts(rows, genes, types)
    x = torch.tensor(values).log1p()
    genes_by_name = np.array([f"gene{number}" for number in range(genes)])
    given: Any
    batches: list[Arguments]
    if name == "pca":
        given = ProbabilisticPCA(rows, genes_by_name, 10, "linear_vae", mean_g=x.mean(0), W_init_scale=0.1)
        batches = [((x_batch,), {}) for x_batch in x.chunk(4)]
    else:
        given = LogisticRegression(rows, genes_by_name, np.array([f"type{number}" for number in range(types)]))
        y = torch.arange(rows) % types
        batches = [(pair, {}) for pair in zip(x.chunk(4), y.chunk(4), strict=True)]
    module = CellariumModule(model=given, optim_fn=torch.optim.Adam, optim_kwargs={"lr": 1e-2})
    module.configure_model()
    program: Any = module.model

    def model(*args: Any) -> None:
        # ``SVI`` trains parameters in Pyro's store only.
        pyro.module("model", program)
        program.model(*args)

    optim = pyro.optim.PyroOptim(module.hparams["optim_fn"], module.hparams["optim_kwargs"])
    return Noted(SVI(model, program.guide, optim, program.elbo), batches)


def sctm(small: bool) -> Noted:
    """STAMP of scTM in its first epochs: topics of spatial data, an encoder of neighbors, and clipped gradients."""
    import scipy.sparse

    give_inf()
    from sctm.stamp import STAMP

    rows, genes = (64, 20) if small else (1_024, 500)
    data = annotated_alone(rows, genes, 8)
    ring = scipy.sparse.diags([1.0, 1.0, 1.0, 1.0], [1, -1, rows - 1, 1 - rows], shape=(rows, rows))
    data.obsp["spatial_connectivities"] = scipy.sparse.csr_matrix(ring)
    model = STAMP(data, n_topics=10)
    with noted(4) as found:
        model.train(max_epochs=1, device="cpu", batch_size=rows // 4)
    return found[-1]


def mobsterm(small: bool) -> Noted:
    """MOBSTERm: clusters of mutations with power-law tails in two samples of a tumor, and hooks on gradients."""
    from MOBSTERm import mobster_MV

    rows, clusters = (60, 2) if small else (1_000, 4)
    rng = np.random.default_rng(0)
    depth = rng.poisson(100.0, size=(rows, 2)) + 1
    shares = rng.choice([0.15, 0.25, 0.35, 0.48], size=(clusters, 2))[rng.integers(clusters, size=rows)]
    variants = np.maximum(rng.binomial(depth, shares), 1 + depth // 25)
    model = mobster_MV(
        torch.tensor(variants, dtype=torch.float32), torch.tensor(depth, dtype=torch.float32), mut_id=None, K=clusters,
        purity=None, kr=None, seed=123, par_threshold=0.005, loss_threshold=0.01, savefig=False, data_folder=None,
        sample_names=None, progress_queue=None, worker_id=0,
    )  # fmt: skip
    # It takes ten steps from ten starts, and one from the best, before it registers hooks.
    with noted(1, taken=11) as found:
        model.run_inference(num_iter=2_000, lr=0.01)
    return found[-1]


def basilica(small: bool) -> Noted:
    """pybasilica: exposures to known mutational signatures and new ones, with hooks on gradients."""
    import pandas as pd
    from pybasilica.run import fit

    give_keyword()
    rows, contexts = (20, 12) if small else (200, 96)
    rng = np.random.default_rng(0)
    names = [f"context{number}" for number in range(contexts)]
    signatures = pd.DataFrame(rng.dirichlet(np.full(contexts, 0.3), size=6), columns=names)
    exposures = rng.dirichlet(np.full(6, 0.5), size=rows)
    mutations = pd.DataFrame(rng.poisson(2_000.0 * exposures @ signatures.to_numpy()), columns=names)
    with noted(1, taken=1) as found:
        fit(x=mutations, k_list=[3], beta_fixed=signatures.iloc[:3])
    return found[-1]


def basilica_mixture(small: bool) -> Noted:
    """Clusters of exposures of pybasilica, with a relaxed indicator of the cluster and hooks on gradients."""
    from pybasilica.run import fit

    give_keyword()
    rows = 20 if small else 200
    rng = np.random.default_rng(0)
    centers = rng.dirichlet(np.ones(5), size=4)
    exposures = np.stack([rng.dirichlet(20.0 * center + 0.1) for center in centers[rng.integers(4, size=rows)]])
    with noted(1, taken=1) as found:
        fit(alpha=[torch.tensor(exposures)], cluster=4)
    return found[-1]


def echidna(small: bool) -> Noted:
    """sc-echidna: copy numbers of clusters of cells by gene, from counts at two times."""
    import pandas as pd
    from echidna.tools.train import echidna_train
    from echidna.tools.utils import EchidnaConfig

    rows, genes, types = (40, 20, 3) if small else (800, 300, 5)
    data = annotated_alone(rows, genes, types)
    data.layers["counts"] = data.X
    rng = np.random.default_rng(2)
    data.obs["cluster"] = np.arange(rows) % types
    data.obs["timepoint"] = [f"time{number % 2}" for number in rng.permutation(rows)]
    data.uns["echidna"] = {}
    copies = pd.DataFrame(rng.gamma(20.0, 0.1, size=(genes, 2)), index=data.var_names, columns=["time0", "time1"])
    with noted(1) as found:
        echidna_train(data, copies, EchidnaConfig(clusters="cluster", device="cpu"))
    return found[-1]


SUBJECTS = {
    "cell2location": Subject(
        "cell2location",
        "200 locations, 500 genes, 8 types",
        lambda small: cell2location(20, 30, 3) if small else cell2location(200, 500, 8),
        whole=1_000,
    ),
    "cell2location, large": Subject(
        "cell2location",
        "600 locations, 3,000 genes, 20 types",
        lambda small: cell2location(30, 50, 4) if small else cell2location(600, 3_000, 20),
        repeats=4,
    ),
    "cell2location, RegressionModel": Subject(
        "cell2location", "batches of 250 of 2,000 cells, 500 genes, 8 types", regression_model
    ),
    "MOFA-FLEX": Subject("mofaflex", "500 samples, 200 and 50 features, 5 factors", mofaflex, whole=2_000),
    "py-irt": Subject("py-irt", "200 people, 50 items", py_irt, whole=2_000),
    "iPoLNG": Subject("iPoLNG", "300 cells, 200 and 200 features, 5 topics", ipolng, whole=3_000),
    "pyroVED, iVAE": Subject("pyroved", "batches of 100 of 400 images of 28 x 28", pyroved, whole=1_000),
    "pyroVED, iVAE, rotations": Subject(
        "pyroved", "batches of 100 of 400 images of 28 x 28", lambda small: pyroved(small, ["r"])
    ),
    "scvi-tools, AmortizedLDA": Subject(
        "scvi-tools", "batches of 256 of 1,024 cells, 500 genes", amortized_lda, whole=1_000
    ),
    "scvi-tools, RESOLVI": Subject("scvi-tools", "batches of 256 of 1,024 cells, 200 genes", resolvi),
    "scvi-tools, Decipher": Subject("scvi-tools", "batches of 256 of 1,024 cells, 500 genes", decipher),
    "GPyTorch": Subject("gpytorch", "500 rows, 32 inducing points", gpytorch),
    "pylineaGT": Subject("pylineagt", "500 rows, 3 columns, 4 components", pylineagt, whole=500),
    "CellBender": Subject("cellbender", "batches of 250 of 1,000 droplets, 200 genes", cellbender, whole=600),
    "cellarium-ml, ProbabilisticPCA": Subject(
        "cellarium-ml", "batches of 256 of 1,024 cells, 500 genes", lambda small: cellarium(small, "pca"), whole=1_000
    ),
    "cellarium-ml, LogisticRegression": Subject(
        "cellarium-ml",
        "batches of 256 of 1,024 cells, 500 genes, 8 types",
        lambda small: cellarium(small, "regression"),
    ),
    "scTM, STAMP": Subject("sctm", "batches of 256 of 1,024 cells, 500 genes, 10 topics", sctm, whole=1_000),
    "MOBSTERm": Subject("mobsterm", "1,000 mutations in 2 samples, 4 clusters", mobsterm, seeds=10, whole=2_000),
    "pybasilica": Subject(
        "pybasilica", "200 samples, 96 contexts, 3 known and 3 new signatures", basilica, seeds=10, whole=500
    ),
    "pybasilica, mixture": Subject("pybasilica", "200 samples, 5 signatures, 4 clusters", basilica_mixture),
    "sc-echidna": Subject("sc-echidna", "720 cells at 2 times, 300 genes, 5 clusters", echidna, seeds=10, whole=1_000),
}
