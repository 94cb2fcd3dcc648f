# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where the data sets are published, and the digests by which an intact copy is known."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SOURCES", "Source"]


@dataclass(frozen=True)
class Source:
    """Where a data set is published, and how to know that a copy of it is intact.

    :param name: name of the set; its file is ``NAME.npz``.
    :param class_names: one name per class.
    :param digests: MD5 of every array (``train_images``, ``train_labels``, ...), see
        :func:`~pyro_radial.datasets.idx_digest`.
    :param urls: for every array, the address of its gzipped IDX file or of an ``.npz`` archive that holds it.
    """

    name: str
    class_names: tuple[str, ...]
    digests: Mapping[str, str]
    urls: Mapping[str, str]


def _idx_urls(base: str) -> dict[str, str]:
    return {
        "train_images": base + "train-images-idx3-ubyte.gz",
        "train_labels": base + "train-labels-idx1-ubyte.gz",
        "test_images": base + "t10k-images-idx3-ubyte.gz",
        "test_labels": base + "t10k-labels-idx1-ubyte.gz",
    }


_FASHION_CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_RETINA_DIGESTS = {
    "train_images": "0d7120352ccacf1316dda6377ee75472",
    "train_labels": "e61521ee0fba34c175b7e1fe4937b302",
    "val_images": "f611b9885e6c49ad14c94b0413ce18d8",
    "val_labels": "fff3cab84eae351bb256f0a5e4e3fd63",
    "test_images": "ee64cf2475832448de5b187d0f526863",
    "test_labels": "fc7115a2c69a89b88a602db5d39872d1",
}
_RETINA_URL = "https://zenodo.org/records/10519652/files/retinamnist.npz"

#: The published sets by name. MNIST and Fashion-MNIST are the original gzipped IDX files: their digests are published,
#: and NumPy reads them, while OpenML's copies hold the same pixels as tables of floats. RetinaMNIST has one publisher,
#: MedMNIST's archive on Zenodo.
SOURCES: dict[str, Source] = {
    "mnist": Source(
        name="mnist",
        class_names=tuple("0123456789"),
        digests={
            "train_images": "6bbc9ace898e44ae57da46a324031adb",
            "train_labels": "a25bea736e30d166cdddb491f175f624",
            "test_images": "2646ac647ad5339dbf082846283269ea",
            "test_labels": "27ae3e4e09519cfbb04c329615203637",
        },
        urls=_idx_urls("https://ossci-datasets.s3.amazonaws.com/mnist/"),
    ),
    "fashion_mnist": Source(
        name="fashion_mnist",
        class_names=_FASHION_CLASSES,
        digests={
            "train_images": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train_labels": "9018921c3c673c538a1fc5bad174d6f9",
            "test_images": "8181f5470baa50b63fa0f6fddb340f0a",
            "test_labels": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        urls=_idx_urls("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
    ),
    "retinamnist": Source(
        name="retinamnist",
        # MedMNIST numbers the grades; these are the names of the clinical scale behind them.
        class_names=("no retinopathy", "mild", "moderate", "severe", "proliferative"),
        digests=_RETINA_DIGESTS,
        urls=dict.fromkeys(_RETINA_DIGESTS, _RETINA_URL),
    ),
}
