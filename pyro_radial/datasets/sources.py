# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where the data sets are published, and the digests by which an intact copy is known."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SOURCES", "Source"]


@dataclass(frozen=True)
class Source:
    """Where a data set is published, and how to know that a copy of it is intact.

    :param name: name of the set; its file is ``NAME.npz``.
    :param class_names: one name per class.
    :param digests: MD5 of every array (``train_images``, ``train_labels``, ...), see
        :func:`~pyro_radial.datasets.idx_digest`.
    :param urls: for every array, the address of its gzipped IDX file or of an ``.npz`` archive that holds it.
    :param file_digests: for every address, the MD5 of the file there, compared before anything of it is read; where
        there is none, the arrays' digests are compared alone.
    """

    name: str
    class_names: tuple[str, ...]
    digests: Mapping[str, str]
    urls: Mapping[str, str]
    file_digests: Mapping[str, str] = field(default_factory=dict)


def _idx_urls(base: str) -> dict[str, str]:
    return {
        "train_images": base + "train-images-idx3-ubyte.gz",
        "train_labels": base + "train-labels-idx1-ubyte.gz",
        "test_images": base + "t10k-images-idx3-ubyte.gz",
        "test_labels": base + "t10k-labels-idx1-ubyte.gz",
    }


def _idx_digests(base: str, train_images: str, train_labels: str, test_images: str, test_labels: str) -> dict[str, str]:
    return dict(zip(_idx_urls(base).values(), (train_images, train_labels, test_images, test_labels), strict=True))


_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
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
        urls=_idx_urls(_MNIST_URL),
        file_digests=_idx_digests(
            _MNIST_URL,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
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
        urls=_idx_urls(_FASHION_URL),
        file_digests=_idx_digests(
            _FASHION_URL,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "retinamnist": Source(
        name="retinamnist",
        # MedMNIST numbers the grades; these are the names of the clinical scale behind them.
        class_names=("no retinopathy", "mild", "moderate", "severe", "proliferative"),
        digests=_RETINA_DIGESTS,
        urls=dict.fromkeys(_RETINA_DIGESTS, _RETINA_URL),
        file_digests={_RETINA_URL: "bd4c0672f1bba3e3a89f0e4e876791e4"},
    ),
}
